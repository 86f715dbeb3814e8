"""The clauses of the platform contract: what a platform promises, each by the name that the kit's reports use.

The first word is the section of the kit that proves it. docs/vendors.md explains them at length.
"""

CLAUSES = {
    # probe
    "probe.pure": "Probing opens no device, makes no context and writes no environment variable.",
    "probe.quick": "Probing and choosing take no longer than a person who types a command would wait.",
    "probe.facts": "What a probe says is consistent: devices, dtypes and formats are there and of the right kind.",
    "probe.reasons": "A platform that cannot run says why, and what would help; it raises nothing.",
    "probe.configure": "configure() is pure, leaves alone what it has settled before, and gives reasons.",
    # device
    "device.arrays": "Arrays come back from a device as they went, of every type and size, empty ones too.",
    "device.wait": "What to_host() gives, waits for the work that was queued before it, and for nothing later.",
    "device.kept": "What was handed over or back stays as it is, whatever the host or the device does afterwards.",
    # memory
    "memory.facts": "Free is at most all; what is allocated is counted, what is freed is free again.",
    "memory.cache": "A cache is zeroed, of the shapes that were asked for, and counted.",
    "memory.limit": "What does not fit is a MemoryError with the numbers and a remedy; everything goes on after it.",
    "memory.cycles": "Caches made and let go again and again leave nothing behind.",
    "memory.plan": "estimate() is what place() takes, and names steps that run: the memory plan is made from it.",
    "memory.sleep": "A device that can sleep gives its memory back, and has its weights again when it wakes.",
    # ops
    "ops.specification": "Every bound provider computes what the op's specification says, to a few roundings.",
    "ops.drafts": "States of steps with draft tokens, and of those after them, are the specification's.",
    "ops.placed": "Products with what place() made of a weight, in every scheme, are the specification's.",
    "ops.finite": "What is not a number in one row stays in that row.",
    # attention
    "attention.specification": "Attention over the platform's own cache equals the specification's, whatever the mix.",
    "attention.refusal": "A layer that a platform cannot serve is refused with all reasons, when it is built.",
    "attention.stale": "What another request left in a page does not matter.",
    "attention.window": "Pages behind a window are 0 in the table, and page 0 may hold anything.",
    "attention.plain": "Attention that keeps nothing sees its own request's tokens in the step, and no others.",
    "attention.shared": "Where V is part of K it is read from there, and keys alone are kept.",
    # cache
    "cache.layout": "The pages that a layout describes are the pages that the device allocates.",
    "cache.format": "Every code of an 8-bit format means what the format says, and what is stored is the nearest one.",
    "cache.tagged": "A cache of one format is never read as another.",
    "cache.groups": "Groups of layers share one pool: a page is one group's, then another's, as their tables say.",
    "cache.cross": "What keep() writes of an encoder's rows is what each token of their requests sees, all of it.",
    # communicator
    "communicator.collectives": "Every collective gives every rank what its definition says, in rank order.",
    "communicator.alone": "On one rank, every collective returns what it was given.",
    "communicator.stages": "A stage's tensors reach the next stage; reports of a step reach all stages, step by step.",
    "communicator.model": "A model shared out over ranks gives the tokens that one rank gives.",
    # graphs
    "graphs.buckets": "With fixed shapes, every declared size runs, and no other.",
    "graphs.settled": "Nothing is compiled once an engine has warmed up.",
    "graphs.padding": "Padding never leaks into results, nor does what stands on page 0, which takes its writes.",
    "graphs.replay": "A step that was recorded gives what it gave when it was run the first time, with new inputs.",
    # sampling
    "sampling.draws": "A seed draws the tokens that the specification draws, whatever else is in the batch.",
    "sampling.edits": "Bans, biases, penalties and cuts are the specification's.",
    "sampling.logprobs": "Log-probabilities and ranks are the specification's.",
    # models
    "models.families": "Small models of every family give the logits of transformers in float32, and greedy tokens; "
    "where each model is compiled, of every family that has something of its own.",
    "models.dtypes": "Every dtype that a platform declares agrees with float32 as far as it goes.",
    "models.schemes": "Every scheme that a platform declares gives a model whose logits stay near the unquantized.",
    "models.outputs": "A step gives what its model was built for: logits, hidden states of rows, taps of all tokens.",
    "models.replaced": "Weights that are written over a running model's give what a model that is built of them gives.",
    "models.turns": "Two models that are compiled side by side, and whose steps take turns on one cache, give each its "
    "own logits, and so when the weights of one were replaced.",
    # numbers
    "numbers.encoders": "Small encoders of every family give the hidden states of transformers in float32, and in "
    "bfloat16 no further from them than transformers is.",
    "numbers.alone": "The hidden states of a text are the same alone and beside others: where a platform declares "
    "batch invariance, to the last bit.",
    "numbers.served": "Embeddings, classes and scores that an engine answers with are those of transformers, of "
    "encoders, and of decoders whose texts come in chunks.",
    # adapters
    "adapters.rows": "A platform that serves adapters writes the rows that Weight.rows names, and leaves all others.",
    "adapters.merged": "A request with an adapter gives the logits of the model that the adapter is merged into, "
    "whichever adapters are beside it in the batch, and whatever is written over these.",
    "adapters.extras": "The same for magnitudes (DoRA), biases, and changes of the token embedding.",
    # oracle
    "oracle.equal": "Alone, batched, chunked, cached, preempted: a request's tokens are the reference's.",
    "oracle.invariant": "A platform that declares batch invariance gives the same bits, whatever else is in the batch.",
    # faults
    "faults.cancel": "A request that is cancelled frees its pages at once, and no other request notices.",
    "faults.step": "A step that fails ends its requests with the reason; the engine and all other requests go on.",
    "faults.request": "What is wrong with one request ends that one alone, or refuses it before it starts.",
    "faults.cache": "A cache that was lost is made again, and no token is lost or doubled.",
}
