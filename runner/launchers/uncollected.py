"""To be imported first, by a fork server: what it imports after this, for its ranks, is imported without the collector.

`begin_rank` ends that.
"""

from runner.launchers.imported import begin_imports

begin_imports()
