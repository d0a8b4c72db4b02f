import os

# Before gRPC is imported: its fork handlers can end a child between fork and exec, and children here begin as new programs.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
