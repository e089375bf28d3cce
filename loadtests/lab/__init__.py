"""The laboratory: measurements that answer what others published of other engines, one child process each."""
