"""Pages that lie elsewhere: in host memory, on a disk, at another engine (connector.py says what each must do)."""
