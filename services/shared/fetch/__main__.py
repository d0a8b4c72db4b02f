"""python -m rootstock_llm.services.shared.fetch FOLDER SOURCE [FOLDER SOURCE …]: downloads each SOURCE into its FOLDER.

SOURCE is a hub id (with @REVISION if it is not main), s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, or the path of a folder.

- FOLDER appears when the download is complete. A complete model is not downloaded again. An interrupted download resumes.
- A file is compared with its checksum if the source reports one. Otherwise, only the size is checked.
- A folder as the SOURCE is copied completely, except for folders named .cache.
- config.json is downloaded first. If the worker would refuse the model, the download ends with the worker's message.
- If the model has no tokenizer.json, transformers converts its tokenizer. Only the worker's image has transformers. Other images
  refuse such a model before the download.

Environment:
  MODEL_FILES      `tokenizer` downloads all files except the weights; it has no effect if SOURCE is a folder
  MAKE_ROOM        if set, and if the volume is too small for the old and the new model, the old model in FOLDER is deleted before
                   the download; no process may be reading the old model then
  CA_FILE          PEM file with certificate authorities to trust in addition to the system's
  HTTPS_PROXY, HTTP_PROXY, NO_PROXY
  HF_ENDPOINT, HF_TOKEN
  AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_STS, AWS_REGION
  AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, or AWS_ROLE_ARN and AWS_WEB_IDENTITY_TOKEN_FILE
                   without these credentials, requests are not signed
  GCS_ENDPOINT, GCE_METADATA_HOST
  GCS_KEY          JSON key of a service account; if unset, the token comes from the metadata server of the node
  FETCH_PATIENCE_S seconds without progress after which a download fails (300)
  FETCH_REPORT_S   seconds between two progress lines (5)
"""

from __future__ import annotations

import os
import signal
import sys
from http.client import HTTPException
from pathlib import Path

from rootstock_llm.services.shared.fetch.download import fetch
from rootstock_llm.services.shared.fetch.files import DownloadStore, Unfetchable, Unserved
from rootstock_llm.services.shared.fetch.stores import S3, Folder, Gcs, Hub


def store_of(source: str) -> DownloadStore:
    """Returns the store of a download source."""
    for begins, kind in (("s3://", S3), ("gs://", Gcs), ("/", Folder)):
        if source.startswith(begins):
            return kind(source)
    return Hub(source)


def main(arguments: list[str]) -> None:
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))  # a container's first process ignores SIGTERM without a handler
    for folder, source in zip(arguments[::2], arguments[1::2], strict=True):
        try:
            fetch(Path(folder), source, store_of(source))
        except Unserved as error:
            sys.exit(str(error))
        except (OSError, HTTPException, Unfetchable) as error:
            sys.exit(f"{source}: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
