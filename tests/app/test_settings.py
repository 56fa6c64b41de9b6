"""The settings: where each value comes from, which place wins, and one line for whatever is wrong."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from pydantic import ValidationError

from chat.amounts import Share
from chat.settings import Settings, SettingsError, default_file, is_loopback, load_settings, trace_settings


def complaint(flags: dict[str, object] | None = None, saved: dict[str, str] | None = None) -> str:
    """The one line that a wrong setting gives."""
    with pytest.raises(SettingsError) as caught:
        load_settings(flags or {}, lambda _: saved or {})
    line = str(caught.value)
    assert "\n" not in line
    return line


@pytest.fixture
def file(home: Path) -> Path:
    """The default settings file, in an existing folder."""
    default_file().parent.mkdir(parents=True)
    return default_file()


def test_without_a_word_everything_has_its_default(home: Path) -> None:
    settings = load_settings({})
    assert (settings.host, settings.port, settings.model) == ("127.0.0.1", 7860, "smollm2")
    assert (settings.device, settings.dtype, settings.device_kv) == ("auto", "auto", None)
    assert (settings.browser, settings.log_level, settings.config) == (True, "warning", None)
    assert settings.data_dir.is_relative_to(home)


def test_the_nearest_of_five_places_wins(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"device_kv": "16MiB"}
    assert load_settings({}).device_kv is None
    assert load_settings({}, lambda _: saved).device_kv == 16 * 2**20
    file.write_text('device_kv = "32MiB"\n')
    assert load_settings({}, lambda _: saved).device_kv == 32 * 2**20
    monkeypatch.setenv("KEEPWARM_DEVICE_KV", "64MiB")
    assert load_settings({}, lambda _: saved).device_kv == 64 * 2**20
    assert load_settings({"device_kv": "128MiB"}, lambda _: saved).device_kv == 128 * 2**20


def test_each_setting_is_merged_by_itself(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('port = 8001\nmodel = "from/file"\ndtype = "float32"\n')
    monkeypatch.setenv("KEEPWARM_MODEL", "from/variable")
    monkeypatch.setenv("KEEPWARM_DTYPE", "bfloat16")
    settings = load_settings({"dtype": "float16", "port": None}, lambda _: {"log_level": "debug"})
    assert (settings.port, settings.model, settings.dtype) == (8001, "from/variable", "float16")
    assert settings.log_level == "debug"


def test_each_value_that_is_no_default_has_its_origin(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("port = 8001\n")
    monkeypatch.setenv("KEEPWARM_MODEL", "from/variable")
    settings, origins = trace_settings({"dtype": "float16", "port": None}, lambda _: {"log_level": "debug"})
    assert (settings.port, settings.log_level) == (8001, "debug")
    assert origins == {
        "dtype": "--dtype",
        "model": "KEEPWARM_MODEL",
        "port": str(file),
        "log_level": "the value saved in the app",
    }


def test_saved_values_are_read_from_the_directory_that_won(tmp_path: Path, file: Path) -> None:
    file.write_text('data_dir = "beside"\n')
    asked: list[Path] = []
    settings = load_settings({}, lambda folder: asked.append(folder) or {})
    assert settings.data_dir == file.parent / "beside"
    assert asked == [settings.data_dir]


def test_saved_values_cannot_move_the_directory_they_are_in_and_may_be_of_other_kinds(tmp_path: Path) -> None:
    saved = {"data_dir": "/elsewhere", "config": "/elsewhere.toml", "theme": "dark"}
    settings = load_settings({"data_dir": str(tmp_path)}, lambda _: saved)
    assert (settings.data_dir, settings.config) == (tmp_path, None)


@pytest.mark.parametrize(
    ("text", "size"),
    [("256MiB", 256 * 2**20), ("1.5 GB", 1_500_000_000), ("2GiB", 2**31), ("1048576", 2**20), ("64 mib", 2**26)],
)
def test_sizes_as_people_write_them(text: str, size: int) -> None:
    assert load_settings({"device_kv": text}).device_kv == size


@pytest.mark.parametrize("text", ["-5", "12 parsecs", "MiB", "", "101%", "-1%", "%", "0.25"])
def test_what_is_not_a_size_is_named(text: str) -> None:
    expected = "(from --device-kv): not a size; write it like 256MiB, 1.5GB or 25% of what is free"
    assert complaint({"device_kv": text}) == f"device_kv = {text!r} {expected}"


@pytest.mark.parametrize("nothing", ["0", "0%", "0MiB"])
def test_a_tier_can_be_turned_off_but_not_the_device(nothing: str) -> None:
    said = "too small; the device's share cannot be turned off: write it like 256MiB, 1.5GB or 25% of what is free"
    assert complaint({"device_kv": nothing}) == f"device_kv = {nothing!r} (from --device-kv): {said}"
    settings = load_settings({"host_kv": "0", "disk_kv": "0%"})
    assert (settings.host_kv, settings.disk_kv) == (0, 0)
    assert complaint({"host_kv": "0.5"}).endswith("not a size; write it like 256MiB, 1.5GB or 25% of what is free")


def test_a_share_of_what_is_free_stays_one_until_it_is_known_what_that_is() -> None:
    settings = load_settings({"device_kv": "25%", "host_kv": " 12.5 % "})
    assert settings.device_kv == Share(0.25)
    assert isinstance(settings.host_kv, Share)
    assert (str(settings.device_kv), str(settings.host_kv), settings.host_kv.of(1001)) == ("25%", "12.5%", 125)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("90", 90), (90, 90), ("30m", 1800), ("1.5h", 5400), ("12 H", 43200), ("30d", 2592000)],
)
def test_durations_as_people_write_them(text: object, seconds: float) -> None:
    assert load_settings({"host_ttl": text}).host_ttl == seconds


def test_a_duration_that_never_ends() -> None:
    assert math.isinf(load_settings({"disk_ttl": "Never"}).disk_ttl)
    assert str(load_settings({"disk_ttl": "Never"}).disk_ttl) == "never"
    assert [str(load_settings({"disk_ttl": text}).disk_ttl) for text in ("5400s", "48h", "90")] == ["90m", "2d", "90s"]


@pytest.mark.parametrize("text", ["0", "0s", "-1m", "5 weeks", "", "nan", True, "1e3"])
def test_what_is_not_a_duration_is_named(text: object) -> None:
    expected = "(from --host-ttl): not a duration; write it like 90s, 30m, 12h, 30d or never"
    assert complaint({"host_ttl": text}) == f"host_ttl = {text!r} {expected}"


@pytest.mark.parametrize("text", ["90", "0.9", "101%", "-5%", "0%", "0.0%", "high", ""])
def test_what_is_not_a_share_is_named(text: str) -> None:
    expected = "(from --host-high): not a share; write it like 90%: more than 0%, at most 100%"
    assert complaint({"host_high": text}) == f"host_high = {text!r} {expected}"


def test_writes_have_a_limit_unless_they_are_unlimited() -> None:
    assert load_settings({}).disk_writes == 100 * 10**9
    assert load_settings({"disk_writes": "unlimited"}).disk_writes is None
    assert load_settings({"disk_writes": "0"}).disk_writes == 0
    assert complaint({"disk_writes": "much"}).endswith("not a size; write it like 256MiB, 1.5GB or unlimited")


def test_a_low_level_above_its_high_one_names_both(file: Path) -> None:
    file.write_text('host_high = "80%"\n')
    assert load_settings({}).host_low is None
    assert complaint({"host_low": "85%"}) == (
        f"host_low = '85%' (from --host-low): above host_high = '80%' (from {file}); lower host_low or raise host_high"
    )
    file.write_text('disk_low = "70%"\n')  # by itself it is right, whatever the flags say
    assert complaint({"disk_high": "60%"}).startswith(f"disk_low = '70%' (from {file}): above disk_high = '60%'")
    assert load_settings({"disk_high": "70%"}).disk_low == Share(0.7)
    file.write_text("")
    saved = {"device_low": "50%", "device_high": "40%"}
    assert complaint(saved=saved).startswith("device_low = '50%' (from the value saved in the app): above device_high")


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_PORT", "")
    assert load_settings({}).port == 7860


def test_a_settings_model_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings({}).port = 1  # type: ignore[misc]


@pytest.mark.parametrize("port", ["abc", "-1", "65536", "78.5", ""])
def test_a_bad_port(port: str) -> None:
    assert (
        complaint({"port": port}) == f"port = {port!r} (from --port): not a port; give a whole number from 0 to 65535"
    )


def test_a_bad_choice_names_the_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_DEVICE", "cudda")
    assert complaint() == (
        "device = 'cudda' (from KEEPWARM_DEVICE): not one of auto, cpu, cuda, mps; the nearest is 'cuda'"
    )
    assert "the nearest is 'float32'" in complaint({"dtype": "fp32", "device": "cpu"})


def test_a_hint_is_given_only_where_one_helps() -> None:
    assert complaint({"dtype": "int8"}) == (
        "dtype = 'int8' (from --dtype): not one of auto, float32, bfloat16, float16"
    )


def test_a_bad_value_is_named_although_a_stronger_place_hides_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('log_level = "loud"\n')
    assert complaint({"log_level": "error"}).startswith(f"log_level = 'loud' (from {file}): not one of")
    monkeypatch.setenv("KEEPWARM_PORT", "abc")
    assert complaint({"port": "8000"}).startswith("port = 'abc' (from KEEPWARM_PORT): not a port")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("model", "", "not a model; name smollm2, a Hugging Face folder or hub id, or a .gguf file"),
        ("adapter", "", "not an adapter; name a folder or a hub id"),
        ("data_dir", "~nobody-of-that-name/x", "not a path"),
        ("data_dir", "a\0b", "not a path"),
        ("context", "1e3", "not a number of tokens; give a whole number from 1"),
        ("context", "9" * 30, "not a number of tokens; give a whole number from 1"),
        ("device_kv", "9" * 30 + "GiB", "not a size; write it like 256MiB, 1.5GB or 25% of what is free"),
        ("device_kv", "nan", "not a size; write it like 256MiB, 1.5GB or 25% of what is free"),
        ("port", "9" * 5000, "not a port; give a whole number from 0 to 65535"),
    ],
)
def test_no_value_is_too_odd_to_be_named(name: str, value: str, words: str) -> None:
    line = complaint({name: value})
    assert line.startswith(f"{name} = {value!r}"[:150])
    assert line.endswith(f"(from --{name.replace('_', '-')}): {words}")
    assert len(line) < 400


def test_a_value_of_another_kind_in_the_file(file: Path) -> None:
    for line, words in (
        ("model = 5", "not a model; name smollm2"),
        ("host = 127", "not an address; use 127.0.0.1"),
        ("data_dir = []", "not a path"),
        ("context = 1.5", "not a number of tokens"),
        ("log_level = {}", "not one of debug, info, warning, error"),
        ('browser = "maybe"', "not a yes or a no"),
    ):
        file.write_text(line)
        assert words in complaint()


def test_a_bad_yes_or_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWARM_BROWSER", "perhaps")
    expected = "(from KEEPWARM_BROWSER): not a yes or a no; write true or false"
    assert complaint() == f"browser = 'perhaps' {expected}"
    monkeypatch.setenv("KEEPWARM_BROWSER", "no")
    assert load_settings({}).browser is False


def test_a_bad_saved_value_says_that_it_was_saved_and_a_flag_helps() -> None:
    assert complaint(saved={"dtype": "int3"}).startswith("dtype = 'int3' (from the value saved in the app): not one of")
    assert load_settings({"dtype": "auto"}, lambda _: {"dtype": "int3"}).dtype == "auto"


def test_a_bad_value_in_the_file_names_the_file(file: Path) -> None:
    file.write_text('device_kv = "lots"\n')
    assert complaint().startswith(f"device_kv = 'lots' (from {file}): not a size")


@pytest.mark.parametrize(
    ("line", "words"),
    [("port = true", "not a port; give a whole number"), ("device_kv = true", "not a size; write it like 256MiB")],
)
def test_a_yes_is_no_number(file: Path, line: str, words: str) -> None:
    file.write_text(line)
    assert words in complaint()


def test_a_byte_order_mark_is_no_mistake(file: Path) -> None:
    file.write_bytes("\ufeffport = 8001\n".encode())
    assert load_settings({}).port == 8001


def test_unknown_names_get_the_nearest_known_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text('data-dir = "x"\n')
    assert complaint() == f"unknown key 'data-dir' in {file}; the nearest known one is 'data_dir'"
    file.write_text('config = "other.toml"\n')
    assert complaint().startswith("unknown key 'config'")
    monkeypatch.setenv("KEEPWARM_PROT", "1")
    assert complaint() == "unknown variable KEEPWARM_PROT; the nearest known one is KEEPWARM_PORT"


def test_files_that_cannot_be_read(tmp_path: Path, file: Path) -> None:
    absent = tmp_path / "absent.toml"
    assert complaint({"config": str(absent)}) == f"config = {str(absent)!r} (from --config): there is no such file"
    file.write_text("port = \n")
    assert complaint().startswith(f"the settings file {file} is not valid TOML: ")
    file.write_bytes(b"model = '\xff'")
    assert complaint().startswith(f"the settings file {file} cannot be read: ")


def test_a_named_file_replaces_the_default_one(tmp_path: Path, file: Path) -> None:
    file.write_text("port = 8001\n")
    other = tmp_path / "other.toml"
    other.write_text('dtype = "float32"\n')
    settings = load_settings({"config": str(other)})
    assert (settings.port, settings.dtype, settings.config) == (7860, "float32", other)


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.com", "127.0.0.300", ""])
def test_other_machines_are_refused_until_there_are_users(host: str) -> None:
    assert complaint({"host": host}).startswith(
        f"host = {host!r} (from --host): only a loopback address is allowed until there are users with passwords"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_are_taken(host: str) -> None:
    assert is_loopback(host)
    assert load_settings({"host": host}).host == host


def test_every_setting_says_what_it_is() -> None:
    assert all(field.description for field in Settings.model_fields.values())
