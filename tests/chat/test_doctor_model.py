"""What the doctor says of a model: where it is, whether it is served and fits, and whether it can chat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from chat import doctor_model
from chat.doctor import Finding
from chat.doctor_machine import Device
from chat.doctor_model import Located, adapter, architecture, chatting, fit, locate, recorded
from chat.settings import Settings
from engine.model.choices import recorded_dtype
from engine.model.selfcheck import KVShape
from engine.model.sizing import Sizing

MIB, GIB = 2**20, 2**30
SIZED = Sizing("m", "llama", 134_515_008, KVShape(30, 3, 64), (None,) * 30, 8192)  # the embedded one
HERE = Located("m, a folder", Path("/m"))
ROOMY = Device("cpu", "bfloat16", 16 * GIB, 8 * GIB)


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def located(model: Path | str, cache: Path, dtype: str = "float32") -> Located:
    found = locate(Settings(model=str(model)), cache, dtype)
    assert isinstance(found, Located)
    return found


def problem(model: Path | str, cache: Path) -> str:
    found = locate(Settings(model=str(model)), cache, "float32")
    assert isinstance(found, Finding)
    assert (found.level, found.fix) == ("problem", "name another with --model")
    return found.detail


# --- where it is ------------------------------------------------------------------------------------------------------


def test_a_folder_is_found_and_its_files_are_looked_through(model: Path, tmp_path: Path) -> None:
    found = located(model, tmp_path)
    assert (found.detail, found.folder, found.convert_numbers) == (f"{model}, a folder", model, 0)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert str(weights) in problem(model, tmp_path)
    weights.unlink()
    assert str(model) in problem(model, tmp_path)
    (model / "config.json").write_text("{")
    assert str(model / "config.json") in problem(model, tmp_path)


def test_the_embedded_model_is_found_converted_or_not(embedded_model: Path, model_cache: Path, tmp_path: Path) -> None:
    fresh = located("smollm2", tmp_path)
    assert fresh.detail.startswith("smollm2, the embedded model of ")
    assert fresh.detail.endswith(
        "; converted at the first start, after which its tokenizer and template can be checked"
    )
    assert (fresh.folder, fresh.convert_numbers) == (None, 134_515_008)
    assert list(tmp_path.iterdir()) == []
    ready = located("smollm2", model_cache)
    assert (ready.folder, ready.convert_numbers) == (embedded_model, 0)
    assert ready.detail.endswith(" MiB, converted")


def test_a_hub_id_that_is_not_here_is_said_to_be_fetched(tmp_path: Path) -> None:
    found = located("nobody/nothing", tmp_path)
    assert found.folder is None
    assert "is not fetched yet" in found.detail


def test_names_that_name_nothing_are_problems(tmp_path: Path) -> None:
    assert problem("/nowhere", tmp_path).startswith("no model '/nowhere'")
    assert problem(tmp_path / "no.gguf", tmp_path).startswith(f"no GGUF file at {tmp_path / 'no.gguf'}")


def test_an_adapter_is_looked_at_too(tmp_path: Path) -> None:
    assert list(adapter(Settings())) == []
    (bad,) = adapter(Settings(adapter=str(tmp_path)))
    assert bad.level == "problem"
    assert str(tmp_path) in bad.detail
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    (other,) = adapter(Settings(adapter=str(tmp_path)))
    assert "only LoRA can be used" in other.detail
    (hub,) = adapter(Settings(adapter="owner/name"))
    assert (hub.level, hub.detail) == ("ok", "owner/name, a hub id, fetched at the first start unless it is there")


def test_the_format_of_an_earlier_start_is_kept(tmp_path: Path) -> None:
    assert recorded(Settings(model="m"), tmp_path) is None
    first = recorded_dtype(tmp_path, "m", "auto", "auto")
    assert recorded(Settings(model="m"), tmp_path) == first
    assert recorded(Settings(model="m", dtype="float16"), tmp_path) is None
    assert recorded(Settings(model="other"), tmp_path) is None


# --- what it is and whether it fits -----------------------------------------------------------------------------------


def test_a_model_that_is_served_is_described(model: Path) -> None:
    sized, finding = architecture(str(model), Located("", model))
    assert sized is not None
    assert finding.level == "ok"
    assert finding.detail == (
        f"llama, {sized.parameters:,} parameters, a context of 1,024 tokens; served by paged SDPA, which every start "
        "compares with the model's own attention"
    )


def test_a_model_that_is_not_served_is_a_problem(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    sized, finding = architecture(str(model), Located("", model))
    assert (sized, finding.level) == (None, "problem")
    assert "cannot be served" in finding.detail


def fits(device: Device = ROOMY, where: Located = HERE, *, running: bool = False, disk: int = GIB, **changed: object):
    found = fit(SIZED, where, Settings(**changed), device, running=running, disk_free=disk)  # type: ignore[arg-type]
    return {finding.what: (finding.level, finding.detail, finding.fix) for finding in found}


def test_what_fits() -> None:
    assert fits() == {
        "weights": ("ok", "257 MiB in bfloat16", ""),
        "cache": ("ok", "360 MiB, the default, hold 16,384 tokens of 23,040 bytes, 2.0 full contexts", ""),
    }
    assert fits(device_kv="1GiB")["cache"][1] == "1 GiB hold 46,592 tokens of 23,040 bytes, 5.7 full contexts"
    assert (
        fits(context=1024)["cache"][1] == "256 MiB, the default, hold 11,648 tokens of 23,040 bytes, 11.4 full contexts"
    )


def test_a_cache_of_less_than_a_context_is_a_problem() -> None:
    level, detail, fix = fits(device_kv="100MiB")["cache"]
    assert (level, fix) == ("problem", "--device-kv 180MiB or more holds a full context")
    assert detail == "100 MiB hold 4,544 tokens of 23,040 bytes, 0.6 full contexts"
    assert fits(device_kv="180MiB")["cache"][0] == "ok"


def test_a_context_that_the_model_was_not_made_for_is_a_problem() -> None:
    assert fits(context=10_000)["context"] == (
        "problem",
        "10,000 tokens, and the model was made for 8,192",
        "--context 8192 or less",
    )


def test_weights_that_do_not_fit_are_a_problem_and_tight_ones_a_warning() -> None:
    level, detail, fix = fits(Device("cpu", "float32", 256 * MIB, 200 * MIB))["weights"]
    assert (level, detail) == ("problem", "513 MiB in float32, more than the memory of 256 MiB")
    assert fix == "choose a smaller model or --dtype bfloat16"
    tight = Device("cpu", "bfloat16", 4 * GIB, 200 * MIB)
    assert fits(tight)["weights"] == (
        "warn",
        "257 MiB in bfloat16, more than the 200 MiB available now",
        "close other programs, or choose a smaller model",
    )
    assert fits(tight, running=True)["weights"][0] == "ok"  # it is the server that takes them


def test_fewer_bits_without_room_for_a_copy_are_a_warning() -> None:
    tight, roomy = (Device("cpu", "bfloat16", 4 * GIB, free * MIB) for free in (640, 644))
    assert fits(roomy, weights="int4")["weights"] == ("ok", "257 MiB in bfloat16", "")
    assert fits(tight, weights="int4")["weights"] == (
        "warn",
        "no room beside int4 for a copy in bfloat16: prompts are read several times slower",
        "close other programs, or start with --weights bf16",
    )
    assert fits(tight, weights="int4", running=True)["weights"][0] == "ok"
    assert fits(tight, weights="bf16")["weights"][0] == "ok"


def test_a_conversion_needs_room_on_the_disk() -> None:
    fresh = Located("m, a GGUF file", None, convert_numbers=134_515_008)
    level, detail, fix = fits(where=fresh, disk=100 * MIB)["weights"]
    assert (level, detail) == ("problem", "257 MiB in bfloat16, to be kept on a disk with 100 MiB free")
    assert fix == "make room, or choose another disk with --data-dir"
    assert fits(disk=100 * MIB)["weights"][0] == "ok"


def test_weights_and_cache_share_the_memory() -> None:
    level, detail, fix = fits(Device("cpu", "bfloat16", 2 * GIB, 2 * GIB), device_kv="2GiB")["cache"]
    assert (level, fix) == ("problem", "a smaller --device-kv, 180MiB or more, or a smaller model")
    assert detail.endswith(": with the weights more than the memory has")
    level, detail, _ = fits(Device("cpu", "bfloat16", 4 * GIB, 2 * GIB), device_kv="2GiB")["cache"]
    assert level == "warn"
    assert detail.endswith(": with the weights more than the 2 GiB available")


# --- whether it can chat ----------------------------------------------------------------------------------------------


def chats(model: Path) -> dict[str, Finding]:
    return {finding.what: finding for finding in chatting(model, Settings())}


def test_a_chat_model_is_fine(model: Path) -> None:
    found = chats(model)
    assert {what: finding.level for what, finding in found.items()} == {"tokenizer": "ok", "chat template": "ok"}
    assert found["tokenizer"].detail == "49,152 tokens, and text comes back as it was"
    assert found["chat template"].detail == "leaves earlier messages as they were, so that they are reused"


def test_a_template_that_rewrites_history_is_a_warning(model: Path) -> None:
    (model / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ loop.revindex }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    finding = chats(model)["chat template"]
    assert finding.level == "warn"
    assert finding.detail == "writes earlier messages anew as the chat grows"


def test_a_model_without_a_template_is_a_warning(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    finding = chats(model)["chat template"]
    assert finding.level == "warn"
    assert finding.fix == "choose a model that was made for chatting, or add its chat_template.jinja"


def test_a_broken_tokenizer_or_template_is_a_problem(model: Path) -> None:
    (model / "chat_template.jinja").write_text("{% for %}")
    assert chats(model)["chat template"].level == "problem"
    (model / "tokenizer.json").write_text("{}")
    broken = chats(model)["chat template"]
    assert broken.level == "problem"
    assert "tokenizer" in broken.detail


def test_a_tokenizer_in_an_older_form_is_left_to_the_first_start(model: Path) -> None:
    (model / "tokenizer.json").unlink()
    assert chats(model)["chat template"].level == "problem"
    (model / "vocab.json").write_text("{}")
    (model / "merges.txt").touch()
    assert {what: finding.level for what, finding in chats(model).items()} == {"tokenizer": "ok"}


def test_a_model_that_names_no_end_is_a_warning(model: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        config = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**config, "eos_token_id": None}))
    finding = chats(model)["end of reply"]
    assert (finding.level, finding.detail) == ("warn", "the model does not say which token ends a reply")


def test_a_tokenizer_that_changes_text_is_a_warning(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    finding = chats(model)["tokenizer"]
    assert finding.level == "warn"
    assert finding.detail == "49,152 tokens; some text does not come back as it was"
    assert doctor_model.SAMPLE.lower() != doctor_model.SAMPLE
