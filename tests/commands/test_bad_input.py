"""Wrong input: status 2, at most three lines that name the fix, printed once over all ranks, and nothing written."""

import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Commands
from custom_files import write_files
from hydra.core.global_hydra import GlobalHydra

from runner.cli import main
from runner.paths import ROOT

# A custom directory that contains every mistake.
MINE = {
    "mine/model/broken.yaml": "_target_: mine_net.Net\nsizes: [1\n",
    "mine/model/absent.yaml": "_target_: mine_nett.Net\n",
    "mine/model/importing.yaml": "_target_: mine_broken.Net\n",
    "mine/model/picky.yaml": "_target_: mine_net.picky\nsize: 3\n",
    "mine/experiment/number.yaml": "# @package _global_\nmodel: 3\n",
    "mine/experiment/typo.yaml": "# @package _global_\nepoch: 3\n",
    "mine/mine_net.py": "class Net: ...\ndef picky(size):\n raise ValueError('size=3 is odd')\n"
    "def rate(step, num_steps, steps_per_epoch, floor=0.1): ...\n",
    "mine/mine_broken.py": "import no_such_library\n",
    # incomplete files
    "mine/model/bare.yaml": "size: 3\n",
    "mine/model/circle.yaml": "_target_: models.toy.Toy\nhidden: ${model.num_outputs}\nnum_outputs: ${model.hidden}\n",
    "mine/model/far.yaml": "_target_: models.toy.Toy\nhidden: ${data.num_output}\n",
    "mine/loss/function.yaml": "_target_: torch.nn.functional.l1_loss\n",
    "mine/loss/strange.yaml": "_target_: torch.nn.functional.l1_loss\n_partial_: true\nsize: 3\n",
    "mine/loss/made.yaml": "_target_: mine_net.picky\n",
    "mine/scheduler/function.yaml": "_target_: mine_net.rate\n",
    # names that are already taken
    "mine/model/toy.yaml": "defaults: [toy, _self_]\nhidden: 3\n",
    "mine/statistics.py": "class Net: ...\n",
    "mine/models.py": "class Net: ...\n",
    "mine/models/mlp.py": "class Net: ...\n",
    "mine/data.py": "import no_such_library\n",
    "file": "",
    "empty/nothing.txt": "",
}
# Overrides, and parts of the message in their order, separated by `...`.
TABLE = {
    # an unknown name
    "model=convnt": "model=convnt: no such model; did you mean convnet? (",
    "modle=toy": "modle=toy: no such key; did you mean model?",
    "experiment=nothing": "experiment=nothing: no such experiment",
    "optimizer.lrr=0.1": "optimizer.lrr=0.1: no such key; did you mean optimizer.lr?",
    "logger=csv logger.csv.path=x": "logger.csv.path=x: no such key",
    "data.num_train=64": "data.num_train=64: no such key; data has sample_shape, num_outputs",
    "+typo=1": "+typo=1: no such key",
    "+checkpoint.kep=2": "+checkpoint.kep=2: no such key; did you mean checkpoint.keep?",
    "+model.typo=1": "model.typo=1: ConvNet has no option typo; choose among: ... channels",
    "loss._target_=torch.nn.CrossEntropyLos": "torch.nn has no CrossEntropyLos; did you mean CrossEntropyLoss?",
    "model._target_=models.convnet": "is a module, not a class",
    # an argument that is not one key=value
    "convnet": "convnet: no value; did you mean model=convnet?",
    "run=a=b": "run=a=b: the value must be quoted; type 'run=\"a=b\"'",
    "model.channels=[16": "model.channels=[16: a bracket is not closed",
    "~model": "~model: every run needs model; leave this out",
    "epochs=1 epochs=2": "epochs=2: epochs is given twice (epochs=1); keep one",
    "--epochs=3": "--epochs=3: no such flag; type epochs=3",
    "--config-name=mine": "--config-name=mine: the main configuration file is fixed; add your options by",
    # initial weights and frozen parameters
    "init_from=nothing.pt": "init_from.path=nothing.pt: no such file or directory",
    "init_from=mine": "init_from.path=mine: it is a directory without checkpoints; name a run that has one",
    "init_from.strict=false": "init_from.strict=false has no effect without init_from.path; add",
    "init_from=x.pt init_from.map=[abc]": "init_from.map.0=abc must be a PATTERN->REPLACEMENT; for example",
    "init_from=x.pt 'init_from.map=[\"(->x\"]'": "init_from.map.0=(->x: the part before -> must be a regular",
    "freeze=[hed]": "freeze.0=hed matches no parameter's name; near it: head.weight, head.bias",
    "freeze=[weight,bias]": "freeze=['weight', 'bias'] leaves no parameter to train; leave at least one unmatched",
    # a value of the wrong type, or out of range
    "epochs=abc": "epochs=abc: Value 'abc' ... could not be converted to Integer",
    "epochs=0 seed=-1 threads=0 max_steps=0": "epochs=0 must ... and 2 more",
    "seed=99999999999999999999": "seed=99999999999999999999 must be below 2**63",
    "optimizer.lr=fast": "optimizer.lr=fast must be float",
    "optimizer.lr=-1": "optimizer.lr=-1: Invalid learning rate",
    "model=mlp model.hidden=[0]": "model.hidden=[0] must be one or more sizes of at least 1; try [256, 128]",
    "model=split model@model.model=mlp model.model.dropout=2": "model.model.dropout=2 must be at least 0 and below 1",
    "model=split model.parts=9": "model.parts=9 must be at least 2 and at most the 3 stages of ConvNet; try 2",
    "precision=fp8": "precision=fp8 must be one of fp64, fp32, bf16, fp16, float8",
    "clip_grad_norm=nan": "clip_grad_norm=nan must be above 0 and finite",
    "scheduler=cosine scheduler.warmup_steps=-1": "scheduler.warmup_steps=-1 must be at least 0",
    "name=a/b": "name=a/b must be 1 to 64 letters",
    "name=${name}": "name=${name}: Recursive interpolation",
    "name=${nam}": "name=${nam}: ... 'nam' not found; did you mean name?",
    "launcher=spawn launcher.master_port=1234": "launcher.master_port=1234 needs several nodes",
    # valid values that do not work together
    "model=[toy,mlp]": "model=[toy,mlp] must be one option; to run several type -m model=",
    "batch_size=2 micro_batches=4": "batch_size=2 must be at least micro_batches = 4",
    "model=convnet data=toy": "convnet needs image samples ... (10,); choose ... digits ... mlp",
    "data.sample_shape=[3,28,28]": "data.sample_shape=[3, 28, 28] must ... try [1, 28, 28]",
    "loss=mse": "loss=mse compares numbers of one shape ... try loss=auto",
    "loss=nll": "loss=nll needs a model that ends in log_softmax; try loss=cross_entropy",
    "sync_batchnorm=true model=mlp": "has no effect on a model without BatchNorm, or ... try sync_batchnorm=auto",
    "precision=fp16 backend=gloo": "precision=fp16 needs a GPU ... try precision=bf16",
    "compile=reduce-overhead backend=gloo": "compile=reduce-overhead needs a GPU ... try compile=true",
    "cuda_graph=true backend=gloo": "cuda_graph=true needs a GPU; try cuda_graph=false",
    "compile=max_autotune": "compile=max_autotune must be one of ... did you mean max-autotune?",
    "loader.prefetch=2": "loader.prefetch=2 needs worker processes; try loader.num_workers=2",
    "loader.timeout_s=9": "loader.timeout_s=9 needs worker processes; try loader.num_workers=2",
    "loader.timeout_s=0 loader.num_workers=1": "loader.timeout_s=0 must be above 0 seconds, or null",
    "loader.drop_last=true batch_size=9999": "leaves no step of the data's 1437 samples; try batch_size=1437",
    # directories of runs
    "outputs=file": "outputs=file must be writable, but ... is no writable directory",
    "hydra.run.dir=elsewhere": "outputs and name decide the directory; type outputs=DIR or name=NAME",
    "resume=last": "resume=last: there is no run under ... outputs/run",
    "resume=empty": "resume=empty is no run directory (it has no overrides.yaml)",
    "run=nowhere": "run=nowhere is no directory; name one under outputs/, or run=last",
    "task=evaluate": "task=evaluate needs the run to read; type run=last",
    "data=mnist data.download=false": "data.root=datasets has no MNIST ... data.download is off",
    # the two launcher groups, and sweeps
    "hydra/launcher=spawn": "no such launcher; did you mean launcher=spawn?",
    "launcher=basic": "no such launcher; did you mean hydra/launcher=basic?",
    "model=toy,mlp": "model=toy,mlp: a sweep needs -m",
    "epochs=1,2": "epochs=1,2: a sweep needs -m; for one list type epochs=[1,2]",
    "-m model=toy,convnt": "model=convnt: no such model; did you mean convnet?",
    "-m model=toy,convnt zzz=1": "zzz=1: no such key",
    "-m model=toy,convnet data=toy model.hidden=3": "model.hidden=3: no such key; model has ... channels",
    "-m hydra/launcher=basic,other": "a sweep cannot vary Hydra's own keys; type one value",
    "-m optimizer.lr=0.1,fast": "optimizer.lr=fast must be float",
    "-m resume=last": "resume=last: there is no sweep under ... outputs/run",
    "-m resume=empty": "resume=empty is no sweep directory (it has no ledger.jsonl)",
    "-m resume=a,b": "resume=a,b: one sweep at a time",
    "-m seed=range(0)": "seed=range(0) has no values, so that there is no job",
    "-m optimizer.lr=interval(0.1,1)": "a grid needs values; list them, or add hydra/sweeper=optuna",
    "-m seed=0,1 batch_size=1,2,3 hydra.sweeper.zip=[seed,batch_size]": "many values, but seed has 2, batch_size has 3",
    "-m seed=0,1 hydra.sweeper.zip=[seed,sed]": "hydra.sweeper.zip=[seed,sed]: sed has no values; did you mean seed?",
    "-m seed=0,1 hydra.sweeper.zip=[seed]": "hydra.sweeper.zip=[seed] must name at least two keys",
    "-m seed=0,1 hydra/launcher=slots hydra.launcher.slots=9999": "slots=9999 must be an integer from 1 to ... cores",
    "-m seed=0,1 hydra.sweeper.max_batch_size=1": "hydra.sweeper.max_batch_size=1: no such key; hydra.sweeper has",
    "-m seed=0,1 +hydra.sweeper.typo=1": "hydra.sweeper: ... unexpected keyword argument 'typo'",
    "sweep.stop_on_failure=true": "sweep.stop_on_failure=true needs a sweep; add -m",
    "-m seed=0,1 launcher=slurm parallel=ddp sweep.stop_on_failure=true": "a queue receives all jobs together",
    "-m seed=0,1 hydra/launcher=slots launcher=ssh launcher.hosts=[a]": "launcher=ssh starts a job on several machines",
    "-m seed=0,1 hydra/launcher=slots launcher=ray": "launcher=ray starts a job on several machines",
    "-m seed=0,1 hydra/launcher=slots +hydra.launcher.hosts=[a]": "hosts: hydra/launcher=slots has no such",
    "-m seed=0,1 hydra/launcher=ssh +hydra.launcher.typo=1": "got an unexpected keyword argument 'typo'",
    "-m seed=0,1 hydra/launcher=ssh": "hydra.launcher.hosts=[] must name machines; type hydra.launcher.hosts=[node1",
    "-m seed=0,1 hydra/launcher=slots +hydra.launcher.machines=no.Such": "machines=no.Such: there is no module no",
    "-m seed=0,1 hydra/launcher=slots launcher=slurm": "hydra/launcher=slots starts jobs itself; use only",
    "-m seed=0,1 hydra/launcher=slots hydra.launcher.slots=1 launcher=spawn": "but hydra.launcher has 1",
    # a custom directory
    "--config-dir nowhere model=mine": "--config-dir=nowhere is not a directory",
    "--config-dir mine model=pikcy": "model=pikcy: no such model; did you mean picky?",
    "--config-dir mine model=broken": "model=broken: ... broken.yaml",
    "--config-dir mine model=absent": "there is no module mine_nett; did you mean mine_net?",
    "--config-dir mine model=importing": "importing mine_broken failed with: ModuleNotFoundError ... mine_broken.py:1",
    "--config-dir mine model=bare": "model=bare: ... mine/model/bare.yaml has no _target_; write `_target_: MODULE.",
    "--config-dir mine model=circle": "model.hidden=${model.num_outputs} in ... mine/model/circle.yaml: Recursive",
    "--config-dir mine model=far": "model.hidden=${data.num_output} in ... mine/model/far.yaml: ... "
    "not found; did you mean data.num_outputs?",
    "--config-dir mine loss=function": "loss._target_=torch.nn.functional.l1_loss is a function of input, target; "
    "write `_partial_: true` into its file",
    "--config-dir mine loss=strange": "loss.size=3: l1_loss has no option size; choose among: ... reduction",
    "--config-dir mine loss=made": "loss.size must be given",
    "--config-dir mine scheduler=function": "scheduler._target_=mine_net.rate is a function of step, num_steps, "
    "steps_per_epoch; write",
    "--config-dir mine model=toy": "model=toy: a file's defaults lead back to it; ... needs another name",
    "--config-dir mine model._target_=statistics.Net": "statistics.py, not ... mine/statistics.py: give that another",
    "--config-dir mine model._target_=models.mlp.Net": "models/mlp.py, not ... mine/models/mlp.py: give that another",
    "--config-dir mine model=picky": "model.size=3 is odd",
    "--config-dir mine experiment=number": "model=3 must be a node; ... `override /model: OPTION`",
    "--config-dir mine experiment=typo": "In 'experiment/typo': ... Key 'epoch' ... did you mean epochs?",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the working directory with the custom directory in it, and undo the changes of an earlier command."""
    write_files(tmp_path, MINE)
    monkeypatch.chdir(tmp_path)
    # The checkout contains `models` and `data` too.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT])
    for name in [name for name in sys.modules if name.partition(".")[0] in ("models", "data")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # importing from the custom directory writes nothing there
    yield tmp_path
    GlobalHydra.instance().clear()
    for name in [name for name in sys.modules if name.startswith("mine_")]:
        del sys.modules[name]


@pytest.mark.fault("bad input", outcome="refused")
@pytest.mark.parametrize("line", TABLE)
def test_wrong_input_is_refused_with_its_message(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["runner", *shlex.split(line)])
    before = listing(folder)
    status = main()
    assert_refused(TABLE[line], status, *capfd.readouterr())
    assert listing(folder) == before


def test_incomplete_world_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(sys, "argv", ["runner"])
    before = listing(folder)
    status = main()
    message = "RANK=0: incomplete world; WORLD_SIZE and MASTER_ADDR and MASTER_PORT must be set too, or none of them\n"
    assert_refused(message, status, *capfd.readouterr())
    assert listing(folder) == before


def test_the_command_itself_refuses_wrong_arguments(folder: Path, commands: Commands) -> None:
    before = listing(folder)
    done = commands.runner("model=convnt")
    assert_refused(TABLE["model=convnt"], done.returncode, done.stdout, done.stderr)
    assert listing(folder) == before


ONE_PROCESS = "parallel=none is for one process, but the world has 2; try parallel=ddp"
# Rank 0 starts late and writes slowly.
LATE = """\
import os, sys, time

if os.environ.get("RANK") == "0":
    time.sleep(2)
    write = sys.stderr.write
    sys.stderr.write = lambda text: (time.sleep(2 * (text != "\\n")), write(text))[1]
"""


@pytest.mark.thorough
@pytest.mark.fault("bad input, on several ranks", outcome="refused")
def test_ranks_of_torchrun_report_it_once(folder: Path, commands: Commands) -> None:
    """Also if rank 0 starts last: torchrun terminates all ranks as soon as one has exited."""
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(LATE)
    before = listing(folder)
    env = {**commands.with_path(folder / "site"), "PYTHONDONTWRITEBYTECODE": "1"}  # of sitecustomize
    done = commands.torchrun(2, "parallel=none", env=env)
    assert done.returncode == 1  # torchrun's own status; its report follows
    own = [text for text in done.stderr.splitlines(keepends=True) if text.startswith("parallel=none")]
    assert_refused(ONE_PROCESS, 2, done.stdout, "".join(own))
    assert len(own) == 1
    assert listing(folder) == before


def assert_refused(message: str, status: int, out: str, err: str) -> None:
    assert (status, out) == (2, "")
    assert 1 <= err.count("\n") <= 3 and err.endswith("\n") and "Traceback" not in err
    place = 0
    for part in message.split(" ... "):
        assert part in err[place:], f"{part!r} in {err[place:]!r}"
        place = err.index(part, place) + len(part)


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in (folder, *folder.rglob("*")))
