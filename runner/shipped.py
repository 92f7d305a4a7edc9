"""The packages `models` and `data` as `runner.shipped.models` and `runner.shipped.data`.

Their top-level names remain free for modules of the user.
"""

from runner.paths import ROOT

__path__ = [str(ROOT)]  # makes this module a package whose submodules are imported from ROOT
