"""Marathon: an OpenAI-compatible inference server for MLX whose generations do not die.

`docs/structure.md` describes a request's life and lists the modules. Modules marked E there run in the engine process
and are the only ones that evaluate arrays; modules marked S run in the server process; B in both.
"""

__version__ = "0.1.0"
