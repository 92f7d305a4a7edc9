"""Models in plain PyTorch, one class per file; none of them knows how it is configured, trained or spread.

A model may offer two descriptions of itself, from which others split, shard and pipeline it:

`stages() -> list[nn.Module]` are as many pieces as are sensible, whose composition in order is `forward`. Each takes
one tensor and gives one. They share the model's own submodules, so that a parameter's identity gives its full name;
every parameter is in exactly one stage, and what a stage adds (a Flatten, say) has neither state nor a training mode.
A tied parameter is the exception: the very same Parameter object under several names, as an embedding's and a head's,
may be in several stages. Its gradient is the sum over them; what cannot sum it (split) refuses the model by name.

`tensor_plan() -> dict[str, "colwise" | "rowwise"]` says how the weights of linear layers are cut, in the order of
forward. The output of a colwise layer stays cut until the next rowwise layer in the plan takes it so and gives a whole
one. A rowwise layer with no colwise one open takes a whole input of which each rank uses its slice; it is the form for
a layer by itself, since it asks of the input and not of the number of outputs that the ranks divide it: 10 classes do
not go into 4. What is not in the plan is whole everywhere, and so are its inputs.
"""
