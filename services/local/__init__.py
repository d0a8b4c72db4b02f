import os

# Must be set before gRPC is imported. gRPC's fork handlers can end a child process between fork and exec. The launcher's children
# do not need these handlers, because they always exec a new program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
