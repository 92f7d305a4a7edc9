"""Text that is converted to the types of schema and constructors, and keys of type text that keep what was typed."""

from pathlib import Path
from typing import Any, get_args

import pytest
from worlds import configure

from runner.config import texts
from runner.config.diagnostics.type_hints import show, type_name
from runner.config.schema import GROUPS, NAMED_GROUPS
from runner.config.texts import keep_text, typed_keys
from runner.errors import InputError

OTHERS = (*GROUPS, *NAMED_GROUPS, *texts.SECTIONS, "remote.options")  # mappings, which have no text
TYPES = {key: kind for key, kind in texts._TYPES.items() if key not in OTHERS}
SAMPLES = {
    "str": ("1e5", "1e5"),
    "int": ("3", 3),
    "float": ("0.5", 0.5),
    "bool": ("False", False),
    "list[int]": ("[3,4]", [3, 4]),
    "list[str]": ("[a,1e5]", ["a", "1e5"]),
    "bool | auto": ("true", True),
    "bool | device": ("device", "device"),
    "bool | convolutions": ("true", True),
    "bool | reduce-overhead | max-autotune": ("true", True),
    "int | auto": ("3", 3),
    "int | none | full": ("2", 2),
}


def value_of(key: str, config: Any) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


def test_every_key_of_the_schema_is_converted_from_the_text_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    default, words = configure()[0], []
    for key, kind in TYPES.items():
        value = value_of(key, default)
        if value is not None or "str" not in type_name(kind):  # the text `null` is a text
            monkeypatch.setenv(key.upper(), show(value))
            words.append(f"{key}=${{oc.env:{key.upper()}}}")
    assert len(words) > 50
    assert repr(configure(*words)[0]) == repr(default)


@pytest.mark.parametrize("key", TYPES)
def test_text_becomes_a_value_of_the_keys_type(key: str) -> None:
    text, value = SAMPLES[type_name(TYPES[key]).removesuffix(" | null")]
    section, _, name = key.rpartition(".")
    for given, expected in [(text, value)] + [("null", None)] * (type(None) in get_args(TYPES[key])):
        if expected is not None or "str" not in type_name(TYPES[key]):
            found = typed_keys({section: {name: given}} if section else {name: given})
            assert repr(value_of(key, found)) == repr(expected)


def test_options_are_converted_to_the_types_of_their_constructors(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"H": "[8,4]", "LR": "0.5", "N": "2", "NONE": "null", "OFF": "false"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    words = ["model.hidden=${oc.env:H}", "optimizer.lr=${oc.env:LR}", "loader.num_workers=${oc.env:N}"]
    words += ["loader.prefetch=${oc.env:NONE}", "loader.drop_last=${oc.env:OFF}", "data.num_outputs=${oc.env:N}"]
    words += ["data.sample_shape=[${oc.env:N},'3']", "optimizer.groups=[{match:bias,weight_decay:${oc.env:LR}}]"]
    config, _ = configure("model=mlp", "data=arrays", *words)
    assert config.model["hidden"] == [8, 4] and config.model["sample_shape"] == config.data["sample_shape"] == [2, 3]
    assert config.optimizer["lr"] == config.optimizer["groups"][0]["weight_decay"] == 0.5
    assert (config.loader["num_workers"], config.loader["prefetch"], config.loader["drop_last"]) == (2, None, False)
    assert config.data["num_outputs"] == config.model["num_outputs"] == 2


def test_references_to_values_of_another_type_become_text() -> None:
    config, _ = configure("name=${seed}", "outputs=${optimizer.lr}", "init_from.path=${compile}", "seed=7")
    assert (config.name, config.outputs, config.init_from.path) == ("7", "0.05", "False")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("plan=${seed}", r"plan=\$\{seed\}: Merge error: int is not a subclass of Planning"),
        ("ema=${freeze}", r"ema=\$\{freeze\}: Merge error: list is not a subclass of Averaging"),
        ("freeze=${model}", r"freeze=\$\{model\}: Cannot merge DictConfig with ListConfig"),
        ("name=${model}", r"name=\$\{model\}: Cannot convert 'DictConfig' to string"),
        ("outputs=${max_steps}", r"outputs=\$\{max_steps\}: Incompatible value 'None' for field of type 'str'"),
        ("micro_batches=${max_steps}", "micro_batches=null must be auto or n of at least 1"),
        ("activation_checkpointing=null", "activation_checkpointing=null must be none, full or n of at least 1"),
        ("plan.world_sizes=[[1]]", r"plan.world_sizes=\[\[1\]\] must list numbers of at least 1"),
        ("seed=${oc.env:WORD}", r"seed=\$\{oc.env:WORD\}: Value 'x' of type 'str' could not be converted to Integer"),
        ("ema.decay=${oc.env:WORD}", r"ema.decay=\$\{oc.env:WORD\}: Value 'x' of type 'str' could not be converted to"),
        ("micro_batches=${oc.env:WORD}", "micro_batches=x must be auto or n of at least 1"),
        ("profile=${oc.env:WORD}", r"profile=\$\{oc.env:WORD\}: Value 'x' is not a valid bool"),
        ("compile=${oc.env:WORD}", "compile=x must be one of true, false, reduce-overhead, max-autotune"),
        ("optimizer.lr=${oc.env:WORD}", r"optimizer.lr=x must be float \| Tensor; for example 0.001"),
        ("optimizer.lr='{_target_: torch.tensor}'", r"optimizer.lr=\{_target_: torch.tensor\} must be float \| Tensor"),
        ("model=mlp model.hidden='[{_target_: x}]'", r"model.hidden=\[\{_target_: x\}\] must be Sequence\[int\]"),
        ("optimizer.lr='1,2'", r"optimizer.lr=1,2 must be float \| Tensor; for example 0.001"),
    ],
)
def test_text_that_is_not_of_the_type_is_refused(word: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "x")
    with pytest.raises(InputError, match=f"^{message}"):
        configure(*word.split(maxsplit=1) if word.startswith("model") else [word])


def test_references_to_numbers_become_text() -> None:
    config, _ = configure("name=${seed}", "outputs=${epochs}", "seed=${batch_size}")
    assert (config.name, config.outputs, config.seed) == ("64", "10", 64)


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("name=1e5", "name='1e5'"),
        ("++name= true ", "++name= 'true' "),
        ("name=1_000", "name='1_000'"),
        ("name=1e5,x,007,[TRUE, 2]", "name='1e5',x,007,['TRUE', '2']"),
        ("name=choice(1.50,'2', 3)", "name=choice('1.50','2', '3')"),
        ("init_from.map=[1e5,'1',a->1]", "init_from.map=['1e5','1',a->1]"),
        *((same, same) for same in ("name=null", "name='1e5'", "name=1 2", "name=${oc.env:A,1},b", "name=range(1,3)")),
        *((same, same) for same in ("seed=1e5", "optimizer.lr=1e5", "model=1e5", "~name", "name", "name=")),
    ],
)
def test_numbers_are_quoted_in_keys_of_type_text(override: str, kept: str) -> None:
    assert keep_text(override) == kept


def test_the_environment_may_name_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PART", "none")
    with pytest.raises(InputError, match=f"^run={tmp_path}/none is no directory"):
        configure("task=evaluate", f"run={tmp_path}/${{oc.env:PART}}")
    assert configure("resume=${oc.env:NOTHING,null}", "name=${oc.env:PART}-${seed}")[0].name == "none-0"
    with pytest.raises(InputError, match="a path with a comma must be quoted; type 'name="):
        configure("name=1e5,x")


@pytest.mark.parametrize("name", ["12e4567", "1e5", "true", "1_000", "007", "1.50"])
def test_a_name_keeps_what_was_typed(name: str) -> None:
    config, request = configure(f"name={name}", f"outputs={name}", "freeze=[1e5]")
    assert config.name == config.outputs == name and config.freeze == ["1e5"]
    assert configure(*request.command.overrides)[0] == config
