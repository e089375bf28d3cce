"""The engine process: owns MLX, decides and runs each iteration."""
