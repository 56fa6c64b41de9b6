"""`python -m engine.model.convert`: turns a GGUF file, or a folder's tokenizer, into files that load quickly.

    gguf FILE DTYPE TARGET        config, tokenizer and safetensors in DTYPE
    tokenizer FOLDER TARGET       tokenizer.json and its settings, from what the folder has instead

It writes one JSON object a line: `done` and `total` on the way, and at the end `ok`, `memory` (it ran out) or `error`,
a sentence. It ends when its input does, so it never outlives whoever started it. It knows nothing of where TARGET goes.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO, TypeVar

from engine.errors import ModelLoadError
from engine.model.files import one_line

Item = TypeVar("Item")


def main(arguments: Sequence[str]) -> None:
    """Do one job and say how it ended."""
    with suppress(OSError):  # where the kernel must end a process for want of memory, it is to be this one
        Path("/proc/self/oom_score_adj").write_text("1000")
    threading.Thread(target=_end_with_input, daemon=True).start()
    # A library that prints must not spoil the lines: they get a descriptor of their own, prints go to standard error.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _say(output, done=0, total=0)
    _say(output, **_result(arguments, output))
    os._exit(0)  # the reading thread still waits on standard input, which an interpreter that winds down aborts on


def _result(arguments: Sequence[str], output: TextIO) -> dict[str, Any]:
    kind, subject, *rest = arguments
    try:
        if kind == "gguf":
            _hasten(output)
            convert_gguf(Path(subject), rest[0], Path(rest[1]))
        else:
            convert_tokenizer(Path(subject), Path(rest[0]))
    except ModelLoadError as error:
        return {"error": str(error)}
    except MemoryError:
        return {"memory": True}
    except Exception as error:  # libraries raise types of their own for a damaged or foreign file
        if "not enough memory" in str(error):  # torch's own allocator
            return {"memory": True}
        return {"error": f"cannot convert {subject}: {one_line(error)}"}
    return {"ok": True}


def _hasten(output: TextIO) -> None:
    """Have transformers do once what it does again and again, and tell how far it is; for this process alone.

    It parses the file three times, and builds the same table of names for every module: most of the time.
    """
    import gguf
    from transformers import modeling_gguf_pytorch_utils

    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    modeling_gguf_pytorch_utils.tqdm = functools.partial(_told, output)


def convert_gguf(file: Path, dtype: str, target: Path) -> None:
    """A GGUF file to safetensors. Raises `ModelLoadError` unless everything in the file came to have its place."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    from engine.model import gguf_config
    from engine.model.gguf_header import read_header
    from engine.model.kinds import require_servable
    from engine.model.weights import check_complete, stored_tensors, weight_files

    logging.set_verbosity_error()
    header = read_header(file)
    with _on_its_own(file) as folder:
        where: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
        factors = _rope_factors(str(folder / file.name), gguf_config.ROPE_FACTORS)
        config = gguf_config.complete(AutoConfig.from_pretrained(folder, **where), header, factors)
        require_servable(str(file), config)
        module, info = AutoModelForCausalLM.from_pretrained(
            folder,
            **where,
            config=config,
            quantization_config=GgufConfig(dequantize=True),
            dtype=getattr(torch, dtype),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are told by name
        )
        check_complete(module, info, str(file))
        if hasattr(module.config, "quantization_config"):
            del module.config.quantization_config
        if ends := _ends(header.facts):
            module.generation_config.eos_token_id = ends
        module.save_pretrained(target)
        AutoTokenizer.from_pretrained(folder, **where).save_pretrained(target)
    kept = sum(tensor.numbers for tensor in stored_tensors(weight_files(target)).values())
    if kept != header.numbers - len(factors or ()):
        raise ModelLoadError(
            f"{file} holds {header.numbers} numbers, of which transformers would use {kept}: "
            "use the model's Hugging Face folder or hub id"
        )


def convert_tokenizer(folder: Path, target: Path) -> None:
    """A tokenizer in an older form, such as tokenizer.model, to tokenizer.json."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False).save_pretrained(target)
    if not (target / "tokenizer.json").is_file():
        raise ModelLoadError(f"the tokenizer in {folder} cannot be turned into a tokenizer.json: add one to the folder")


def _rope_factors(file: str, name: str) -> list[float] | None:
    """What the speeds of the positions are divided by, if the file has a tensor of that `name`."""
    import gguf

    found = (tensor.data for tensor in gguf.GGUFReader(file).tensors if tensor.name == name)
    return next(([float(number) for number in data] for data in found), None)


def _ends(facts: dict[str, Any]) -> list[int]:
    """The ids that end a reply: of the text, of a turn, and of a message."""
    ends = (facts.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return sorted({end for end in ends if isinstance(end, int)})


@contextmanager
def _on_its_own(file: Path) -> Iterator[Path]:
    """A folder with this file only: from another, transformers would take what lies beside it for a part of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            (folder / file.name).symlink_to(file.resolve())
        except OSError:  # Windows allows it to few
            os.link(file.resolve(), folder / file.name)
        yield folder


def _told(output: TextIO, items: Sequence[Item] | Iterable[Item], **_: Any) -> Iterator[Item]:
    """In the place of a progress bar: hands out the items and says how many there were."""
    items = list(items)
    for done, item in enumerate(items, 1):
        yield item
        _say(output, done=done, total=len(items))


def _say(output: TextIO, **words: Any) -> None:
    output.write(json.dumps(words) + "\n")
    output.flush()


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
