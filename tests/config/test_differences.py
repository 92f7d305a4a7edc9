"""What differs between two configurations, by key."""

import json
import sys
from collections import OrderedDict
from types import ModuleType

import pytest
import torch

from runner.config.differences import differences


class Made:
    def __init__(self, dtype: object = torch.float32, kind: object = OrderedDict, sizes: object = (1, {2: complex})):
        self.dtype, self.kind, self.sizes = dtype, kind, sizes


def test_a_default_that_json_has_not_is_told_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made_here")
    module.__dict__["Made"] = Made
    monkeypatch.setitem(sys.modules, "made_here", module)
    before = {"model._target_": "made_here.Made"}
    now = {**before, "model.dtype": "float64", "model.kind": "dict", "model.sizes": [1]}
    found = differences(before, now)
    assert found["model.dtype"] == ["torch.float32", "float64"]
    assert found["model.kind"] == ["<class 'collections.OrderedDict'>", "dict"]
    assert found["model.sizes"] == [[1, {"2": "<class 'complex'>"}], [1]]
    assert json.loads(json.dumps(found)) == found
