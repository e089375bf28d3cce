"""Caches of rows kept on disk, so that a resume, a restart or a long prefix costs a read and not a prefill."""
