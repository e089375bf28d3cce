"""Load tests, soaks and the tiny models that they and the tests run on. Nothing here is imported by the server."""
