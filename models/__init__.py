"""Models in plain PyTorch, one class per file, which do not depend on configuration, training or parallel modes.

A model may define three methods that describe its structure. Parallel modes use them to split and shard it:

`stages() -> list[nn.Module]` returns modules whose composition, in order, is `forward`. Each stage accepts one tensor
and returns one. Stages consist of the model's own submodules, so that a parameter keeps its full name; every parameter
belongs to exactly one stage. A module that a stage adds, such as Flatten, must have no state and no training mode.
A tied parameter is an exception: the same Parameter object under several names, such as the weight of an embedding and
of a head, may belong to several stages, and so may a module that forward calls several times. Its gradient is the sum
over these stages. `split`, which cannot compute that sum, refuses such a model with an error that names the parameter.
For parallel.sequence, the first stage gets all positions of a sample, and the others only some of them. A stage whose
result depends on the positions, other than by F.scaled_dot_product_attention, accepts the keyword `first_position`.

`blocks() -> list[nn.Module]` returns submodules that each forward calls exactly once, such as the layers of an encoder,
for a model without stages. fsdp gathers the parameters of one block at a time, and activation checkpointing recomputes
each block.

`tensor_plan() -> dict[str, "colwise" | "rowwise"]` maps the names of linear layers, in the order of forward, to the
dimension in which tensor parallelism shards their weights. The output of a colwise layer is sharded; the next rowwise
layer of the plan accepts it and returns a whole output. A rowwise layer without a preceding colwise layer accepts a
whole input, of which each rank uses its slice. That form suits a single layer, because the number of ranks must then
divide the number of inputs and not of outputs, such as 10 classes on 4 ranks. Layers that are not in the plan are
replicated.
"""
