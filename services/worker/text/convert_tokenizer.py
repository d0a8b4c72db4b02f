"""python -m rootstock_llm.services.worker.text.convert_tokenizer FOLDER [OUT]: writes tokenizer.json for a folder without one.

transformers converts the folder's other tokenizer files, such as tokenizer.model, or vocab.json and merges.txt. The services read
only tokenizer.json, because most of their images do not contain transformers.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from rootstock_llm.services.shared.hf_tokenizer import load_tokenizer, vocabulary_files

WRITTEN = ("tokenizer.json", "tokenizer_config.json")  # files that convert() may write
TEXTS = ("", "Hello, world!", "  two  spaces\n\tand a tab", "1234 + 5 = x", "é 你好 😀")  # both tokenizers must give equal ids
LIBRARIES = ("sentencepiece", "tiktoken")  # libraries that transformers needs to read some tokenizer files


class NotConverted(ValueError):
    """transformers cannot convert the folder's tokenizer. The message has the reason and the remedy."""


def convert(folder: Path, out: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json into `out`, each only if `folder` has no such file.

    Raises:
        NotConverted: transformers cannot read the folder, cannot write tokenizer.json, or tokenizes the TEXTS differently than
            the converted file.
        OSError: a file cannot be written.
    """
    try:
        original = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a missing library, an unknown class, a broken file
        raise NotConverted(_reason(folder, str(error).strip().partition("\n")[0].rstrip("."))) from error
    with tempfile.TemporaryDirectory() as made:
        original.save_pretrained(made)
        if not Path(made, WRITTEN[0]).is_file():
            raise NotConverted(_reason(folder, "its tokenizer class cannot write tokenizer.json"))
        for name in WRITTEN:
            if Path(folder, name).is_file():
                shutil.copy(Path(folder, name), made)
        converted = load_tokenizer(made)
        if converted.encode_batch(TEXTS, True) != [original(text).input_ids for text in TEXTS]:
            raise NotConverted(_reason(folder, "the converted tokenizer gives other token ids than transformers"))
        for name in WRITTEN:
            if not Path(folder, name).is_file():
                shutil.copy(Path(made, name), out)


def _reason(folder: Path, why: str) -> str:
    found = ", ".join(vocabulary_files(folder)) or "no tokenizer files"
    absent = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    first = f"Install {' and '.join(absent)} with pip" if absent else "Correct the files"
    return (
        f"transformers cannot convert the tokenizer of {folder} ({found}): {why}. {first} and run"
        f" `python -m rootstock_llm.services.worker.text.convert_tokenizer {folder}` again, or copy a tokenizer.json of this"
        " model into it."
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m rootstock_llm.services.worker.text.convert_tokenizer", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="Model folder without tokenizer.json.")
    parser.add_argument("out", type=Path, metavar="OUT", nargs="?", help="Folder that gets the files. Default: FOLDER.")
    arguments = parser.parse_args()
    try:
        convert(arguments.folder, arguments.out or arguments.folder)
    except (NotConverted, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
