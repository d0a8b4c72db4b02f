import os

# Must precede the import of gRPC: its fork handlers can end a child between fork and exec. Children here always exec a new
# program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
