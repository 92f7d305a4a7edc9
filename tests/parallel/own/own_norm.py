"""A task that returns the norm of the initial weights."""

from runner import JobTask


class WeightNorm(JobTask):
    def run(self, config, experiment, world, directory, console):
        model = experiment.parallel.prepare(experiment.recipe, world)
        return {"weight_norm": model.norm(model.local_parameters()).item()}
