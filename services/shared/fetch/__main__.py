"""python -m services.shared.fetch FOLDER SOURCE …: fetches each model into its folder, which is there when it is whole.

SOURCE: a hub id (@revision for one that is not the newest), s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or a folder's path. What was
fetched before stays; what was cut short goes on where it ended. Sums of files are compared with what the source says. A model
without tokenizer.json gets one from transformers, which the worker's image has. Other images refuse it before its download.
config.json comes first: if the worker would refuse the model for it, the download ends with the worker's sentence.

Environment:
  MODEL_FILES      tokenizer: all but the weights
  MAKE_ROOM        where there is no room for both, what is in the folder goes first: nobody reads it
  CA_FILE          certificates to trust besides the system's; HTTPS_PROXY, HTTP_PROXY and NO_PROXY as everywhere
  HF_ENDPOINT, HF_TOKEN
  AWS_ENDPOINT_URL, AWS_REGION, AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or AWS_ROLE_ARN and
                   AWS_WEB_IDENTITY_TOKEN_FILE; with none of them requests are not signed
  GCS_ENDPOINT, GCS_KEY  the JSON key of a service account; without it the node's metadata server is asked for a token
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from services.shared.fetch.download import fetch
from services.shared.fetch.files import Store, Unfetchable, Unserved
from services.shared.fetch.folder import Folder
from services.shared.fetch.gcs import Gcs
from services.shared.fetch.hub import Hub
from services.shared.fetch.s3 import S3


def store_of(source: str) -> Store:
    for begins, kind in (("s3://", S3), ("gs://", Gcs), ("/", Folder)):
        if source.startswith(begins):
            return kind(source)
    return Hub(source)


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # a container's first process is not ended by it otherwise
    for folder, source in zip(arguments[::2], arguments[1::2], strict=True):
        try:
            fetch(Path(folder), source, store_of(source))
        except Unserved as error:
            sys.exit(str(error))
        except (OSError, Unfetchable) as error:
            sys.exit(f"{source}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
