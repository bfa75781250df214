"""Every collective, called in a table: results, dtypes and errors as lines of JSON."""

import json
import sys
import warnings

import horovod.torch as hvd
import torch

warnings.simplefilter("ignore")
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.bool,
)
OPS = {
    "Average": hvd.Average,
    "Sum": hvd.Sum,
    "Min": hvd.Min,
    "Max": hvd.Max,
    "Product": hvd.Product,
}
rows = {}


def plain(value):
    if isinstance(value, torch.Tensor):
        whole = value.detach().float() if value.dtype == torch.bfloat16 else value.detach()
        return [str(value.dtype), list(value.shape), whole.tolist()]
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def call(name, function):
    if "--tell" in sys.argv:
        print(name, file=sys.stderr, flush=True)
    try:
        rows[name] = plain(function())
    except Exception as error:
        rows[name] = {"error": type(error).__name__, "says": str(error)}


def values(dtype, shape=(2, 3), offset=0):
    count = 1
    for extent in shape:
        count *= extent
    numbers = torch.arange(count).reshape(shape) * (RANK + 1) + 3 * RANK + 1 + offset
    return numbers.to(dtype) if dtype != torch.bool else numbers % 2 == 0


def finish(handle):
    hvd.poll(handle)
    return hvd.synchronize(handle)


for dtype in DTYPES:
    kind = str(dtype).split(".")[1]
    for op in OPS:
        call(f"allreduce {kind} {op}", lambda: hvd.allreduce(values(dtype), op=OPS[op]))
    call(f"allgather {kind}", lambda: hvd.allgather(values(dtype, (RANK + 1, 2))))
    call(f"broadcast {kind}", lambda: hvd.broadcast(values(dtype), root_rank=1))
    call(f"alltoall {kind}", lambda: hvd.alltoall(values(dtype, (4,))))
    for op in OPS:
        call(
            f"reducescatter {kind} {op}",
            lambda: hvd.reducescatter(values(dtype, (5, 2)), op=OPS[op]),
        )

half = torch.float16
thirds = values(torch.float32) / 3
call("prescale", lambda: hvd.allreduce(thirds, op=hvd.Sum, prescale_factor=0.3))
call("postscale", lambda: hvd.allreduce(thirds, op=hvd.Sum, postscale_factor=0.3))
call("both scales", lambda: hvd.allreduce(thirds, prescale_factor=0.3, postscale_factor=1.7))
call(
    "scale of integers", lambda: hvd.allreduce(values(torch.int32), op=hvd.Sum, prescale_factor=0.5)
)
call(
    "postscale of integers",
    lambda: hvd.allreduce(values(torch.int64), op=hvd.Sum, postscale_factor=0.4),
)
call("scale of halves", lambda: hvd.allreduce((values(half) / 3), prescale_factor=0.3))
call(
    "postscale of halves",
    lambda: hvd.allreduce((values(half) / 3), op=hvd.Sum, postscale_factor=0.3),
)
call("scaled minimum", lambda: hvd.allreduce(thirds, op=hvd.Min, prescale_factor=0.3))
call("Adasum", lambda: hvd.allreduce(thirds, op=hvd.Adasum))
call("Adasum float64", lambda: hvd.allreduce(thirds.double(), op=hvd.Adasum))
call("Adasum half", lambda: hvd.allreduce(thirds.half(), op=hvd.Adasum))
call("Adasum of integers", lambda: hvd.allreduce(values(torch.int32), op=hvd.Adasum))
call("average=False", lambda: hvd.allreduce(thirds, average=False))
call("average=True", lambda: hvd.allreduce(thirds, True))
call("average and op", lambda: hvd.allreduce(thirds, average=True, op=hvd.Sum))
call("fp16", lambda: hvd.allreduce(thirds, compression=hvd.Compression.fp16))
call(
    "fp16 of integers", lambda: hvd.allreduce(values(torch.int32), compression=hvd.Compression.fp16)
)
call("scalar", lambda: hvd.allreduce(torch.tensor(float(RANK))))
call("empty", lambda: hvd.allreduce(torch.empty(0)))
call("named", lambda: hvd.allreduce(thirds, name="a"))
call("no such op", lambda: hvd.allreduce(thirds, op=17))
call("not contiguous", lambda: hvd.allreduce(torch.ones(3, 2).t()))
call("no tensor", lambda: hvd.allreduce(3.0))


def in_place():
    mine = values(torch.float32)
    same = hvd.allreduce_(mine)
    return [mine, same is mine]


call("allreduce_", in_place)
call("allreduce_async", lambda: finish(hvd.allreduce_async(thirds, name="x", op=hvd.Sum)))


def leaves_its_input():
    mine = values(torch.float32)
    hvd.allreduce(mine, op=hvd.Sum)
    return mine


call("allreduce leaves its input", leaves_its_input)
call(
    "a handle twice",
    lambda: [h := hvd.allreduce_async(thirds), hvd.synchronize(h), hvd.synchronize(h)][1:],
)
pair = [values(torch.float32), values(torch.float64, (3,))]
call("grouped", lambda: hvd.grouped_allreduce(pair, op=hvd.Sum))
call("grouped average", lambda: hvd.grouped_allreduce(pair))
call("grouped fp16", lambda: hvd.grouped_allreduce(pair[:1] * 2, compression=hvd.Compression.fp16))


def grouped_in_place():
    mine = [values(torch.float32), values(torch.float32, (3,))]
    same = hvd.grouped_allreduce_(mine, op=hvd.Max)
    return [mine, [a is b for a, b in zip(mine, same)], type(same).__name__]


call("grouped_", grouped_in_place)
call("grouped async", lambda: finish(hvd.grouped_allreduce_async(pair, name="g")))
call(
    "grouped allgather",
    lambda: hvd.grouped_allgather([values(half, (RANK + 1,)), values(half, (2, 2))]),
)
call(
    "grouped reducescatter",
    lambda: hvd.grouped_reducescatter([values(torch.float32, (5, 2)), thirds]),
)
call("allgather of nothing by one", lambda: hvd.allgather(values(torch.float32, (2 * RANK, 3))))
call("allgather scalar", lambda: hvd.allgather(torch.tensor(1.0)))
call("allgather async", lambda: finish(hvd.allgather_async(thirds, name="y")))
call("broadcast from 0", lambda: hvd.broadcast(thirds, 0))
call("broadcast out of range", lambda: hvd.broadcast(thirds, 5))


def broadcast_in_place():
    mine = values(torch.int64)
    same = hvd.broadcast_(mine, 0)
    return [mine, same is mine]


call("broadcast_", broadcast_in_place)
call("broadcast async", lambda: finish(hvd.broadcast_async(thirds, 1, name="z")))
splits = [1, 3] if RANK == 0 else [2, 0]
rows_of = sum(splits)
call("alltoall list", lambda: hvd.alltoall(values(torch.float32, (rows_of, 2)), splits=splits))
call(
    "alltoall tensor",
    lambda: hvd.alltoall(
        values(torch.float32, (rows_of, 2)), splits=torch.tensor(splits, dtype=torch.int32)
    ),
)
call(
    "alltoall int64",
    lambda: hvd.alltoall(values(torch.float32, (rows_of, 2)), splits=torch.tensor(splits)),
)
call(
    "alltoall async",
    lambda: finish(hvd.alltoall_async(values(torch.float32, (rows_of,)), splits=splits)),
)
call(
    "alltoall async without splits", lambda: finish(hvd.alltoall_async(values(torch.float32, (4,))))
)
call("alltoall odd", lambda: hvd.alltoall(values(torch.float32, (3,))))
call("alltoall too many", lambda: hvd.alltoall(values(torch.float32, (3,)), splits=[2, 2]))
call("alltoall too few", lambda: hvd.alltoall(values(torch.float32, (3,)), splits=[1, 1]))
call("alltoall three splits", lambda: hvd.alltoall(values(torch.float32, (3,)), splits=[1, 1, 1]))
call("reducescatter sum", lambda: hvd.reducescatter(values(torch.float32, (5, 2)), op=hvd.Sum))
call(
    "reducescatter scaled",
    lambda: hvd.reducescatter(thirds, op=hvd.Sum, prescale_factor=0.3, postscale_factor=0.7),
)
call("reducescatter one row", lambda: hvd.reducescatter(values(torch.float32, (1, 3))))
call("reducescatter scalar", lambda: hvd.reducescatter(torch.tensor(1.0)))
call("reducescatter async", lambda: finish(hvd.reducescatter_async(thirds)))
call("reducescatter fp16", lambda: hvd.reducescatter(thirds, compression=hvd.Compression.fp16))
call("barrier", hvd.barrier)
call("broadcast_object", lambda: hvd.broadcast_object({"a": [RANK, 1.5]}, root_rank=1))
call("allgather_object", lambda: hvd.allgather_object({"rank": RANK, "pad": "x" * RANK}))


# Ranks that disagree, and ranks that come in another order.
call("shapes differ", lambda: hvd.allreduce(torch.ones(2 + RANK), name="s"))
call("dims differ", lambda: hvd.allreduce(torch.ones((2,) * (1 + RANK)), name="d"))
call(
    "dtypes differ",
    lambda: hvd.allreduce(torch.ones(2, dtype=(torch.float32, torch.float64)[RANK]), name="t"),
)
call("ops differ", lambda: hvd.allreduce(torch.ones(2), op=(hvd.Sum, hvd.Min)[RANK], name="o"))
call(
    "scales differ",
    lambda: hvd.allreduce(torch.ones(2), op=hvd.Sum, prescale_factor=1.0 + RANK, name="f"),
)
call("roots differ", lambda: hvd.broadcast(torch.ones(2), RANK, name="r"))
call("broadcast shapes differ", lambda: hvd.broadcast(torch.ones(2 + RANK), 0, name="bs"))
call("gathered rows differ", lambda: hvd.allgather(torch.ones(2, 2 + RANK), name="gr"))
call("gathered dims differ", lambda: hvd.allgather(torch.ones((2,) * (1 + RANK)), name="gd"))
call("scattered shapes differ", lambda: hvd.reducescatter(torch.ones(2 + RANK), name="rs"))
call("alltoall rows differ", lambda: hvd.alltoall(torch.ones(2, 2 + RANK), name="ar"))
call("after errors", lambda: hvd.allreduce(torch.ones(2)))


def other_order():
    names = ["p", "q", "r"][:: 1 if RANK else -1]
    handles = {
        n: hvd.allreduce_async(values(torch.float32, (ord(n) - 110,)), name=n) for n in names
    }
    return [hvd.synchronize(handles[name]) for name in sorted(handles)]


call("other order", other_order)


def same_name():
    first = hvd.allreduce_async(torch.ones(2), name="twice")
    try:
        second = hvd.allreduce_async(torch.ones(2), name="twice")
        return hvd.synchronize(second)
    finally:
        hvd.synchronize(first)


if "--racy" in sys.argv:
    call("one name twice", same_name)


# Gradients through collectives.
def gradient(function, shape=(2, 3)):
    leaf = values(torch.float32, shape).requires_grad_()
    out = function(leaf)
    out = out if isinstance(out, torch.Tensor) else out[0]
    weight = (torch.arange(out.numel()).reshape(out.shape) + 1.0) * (RANK + 1)
    (out * weight).sum().backward()
    return leaf.grad


call("gradient of allreduce", lambda: gradient(hvd.allreduce))
call("gradient of sum", lambda: gradient(lambda t: hvd.allreduce(t, op=hvd.Sum)))
call("gradient of scaled", lambda: gradient(lambda t: hvd.allreduce(t, prescale_factor=0.5)))
call("gradient of grouped", lambda: gradient(lambda t: hvd.grouped_allreduce([t, t * 2])[1]))
call("gradient of allgather", lambda: gradient(hvd.allgather, (RANK + 1, 2)))
call(
    "gradient of grouped allgather",
    lambda: gradient(lambda t: hvd.grouped_allgather([t]), (RANK + 1, 2)),
)
call("gradient of broadcast", lambda: gradient(lambda t: hvd.broadcast(t, 1)))
call(
    "gradient of alltoall", lambda: gradient(lambda t: hvd.alltoall(t, splits=splits), (rows_of, 2))
)
call("gradient of even alltoall", lambda: gradient(hvd.alltoall, (2, 2)))
call("gradient of reducescatter", lambda: gradient(hvd.reducescatter, (3, 2)))
call("gradient of summed scatter", lambda: gradient(lambda t: hvd.reducescatter(t, op=hvd.Sum)))
call("gradient of grouped scatter", lambda: gradient(lambda t: hvd.grouped_reducescatter([t])))


def sparse():
    indices = torch.tensor([[RANK, 2]])
    mine = torch.sparse_coo_tensor(indices, torch.ones(2, 2) * (RANK + 1), (4, 2))
    return hvd.sparse_allreduce_async(mine, name="sp", op=hvd.Average)().to_dense()


call("sparse", sparse)

# Who am I.
call(
    "facts",
    lambda: [SIZE, hvd.local_size(), hvd.cross_size(), hvd.cross_rank(), hvd.is_initialized()],
)
call("ranks", lambda: [RANK, hvd.local_rank()])
call("gloo", lambda: [hvd.gloo_built(), hvd.gloo_enabled()])
call(
    "set of all",
    lambda: [
        hvd.global_process_set.size(),
        hvd.global_process_set.rank(),
        hvd.global_process_set.included(),
        hvd.global_process_set.ranks,
    ],
)
call("another set", lambda: hvd.add_process_set([0]).size())
call("constants", lambda: sorted(OPS.values()) + [hvd.Adasum])


# Those who have no more data.
def join():
    sums = []
    for batch in range(2 + 2 * RANK):
        sums.append(hvd.allreduce(torch.ones(2) * (batch + 1), name=f"j.{batch}"))
    return [hvd.join(), sums]


call("join", join)
call("join at once", lambda: hvd.join() in (0, 1))
call("average after join", lambda: hvd.allreduce(torch.ones(2) * RANK, name="after"))


def min_of_joined():
    answer = hvd.allreduce(torch.ones(2), op=hvd.Min, name="mj") if RANK else None
    hvd.join()
    return answer


def gather_of_joined():
    answer = hvd.allgather(torch.ones(2), name="gj") if RANK else None
    hvd.join()
    return answer


def broadcast_of_joined():
    answer = hvd.broadcast(torch.ones(2), 1, name="bj") if RANK else None
    hvd.join()
    return answer


def product_and_then_join():
    try:
        return min_of_joined()
    finally:
        if RANK:
            hvd.join()


for name, function in (
    ("minimum", min_of_joined),
    ("gather", gather_of_joined),
    ("broadcast", broadcast_of_joined),
):
    try:
        rows[f"{name} of joined"] = plain(function())
    except Exception as error:
        rows[f"{name} of joined"] = {"error": type(error).__name__, "says": str(error)}
        hvd.join()

hvd.shutdown()
call("after shutdown", lambda: [hvd.is_initialized()])
call("rank after shutdown", hvd.rank)
with open(sys.argv[1] + f".{RANK}", "w") as file:
    json.dump(rows, file)
