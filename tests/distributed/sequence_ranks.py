"""Functions that run on the ranks for test_sequence_parallel.py."""

import ctypes
import resource

import torch
import torch.distributed as dist

from lightning_rlhf.batching.packing import pack_texts
from lightning_rlhf.extras.algorithms.divergence import Distillation, TeacherHead, TeacherOutputs
from lightning_rlhf.models.sequence_parallel import SequenceRanks
from tests.models.test_packed_attention import packings, source, texts
from tests.stand_ins import VOCABULARY


def ranks():
    """Join the default process group."""
    dist.init_process_group("gloo")
    return SequenceRanks(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def gap(ours, theirs):
    """Return the largest difference, relative to the largest number."""
    return float((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-3))


def summed_gradients(loss, model, group):
    """Return the gradients of a loss as the reduction of FSDP does: averaged over the processes."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    if group is not None:
        for gradient in gradients:
            dist.all_reduce(gradient, group=group.group)
            gradient /= group.size
    return torch.cat([gradient.flatten() for gradient in gradients])


def scores_and_gradients(model, layout, group):
    model.sequence_ranks = group
    scores = model(*texts(), packing=layout, temperature=0.7, squares=True)
    values = torch.stack(scores[:3])
    weights = torch.linspace(-1, 2, values.numel()).view_as(values)
    return values.detach(), summed_gradients((values * weights).sum(), model, group)


def architectures(names):
    """Return for each architecture and layout the differences from one process."""
    group, result = ranks(), {}
    for name in names:
        model = source(name).causal()
        for layout, packing in {"padded": None, **packings()}.items():
            expected, gradients = scores_and_gradients(model, packing, None)
            values, ours = scores_and_gradients(model, packing, group)
            result[f"{name}, {layout}"] = [gap(values, expected), gap(ours, gradients)]
    return result


def key_heads():
    """Return the differences from one process for several numbers of heads of queries and keys."""
    group, result = ranks(), {}
    for heads, keys in ((4, 1), (12, 3), (4, 4), (8, 2), (12, 6)):
        model = source("llama", hidden_size=96, num_attention_heads=heads, num_key_value_heads=keys).causal()
        expected, gradients = scores_and_gradients(model, packings()["shared prompts"], None)
        values, ours = scores_and_gradients(model, packings()["shared prompts"], group)
        result[f"{heads} heads, {keys} of keys"] = [gap(values, expected), gap(ours, gradients)]
    return result


def scalar():
    """Return the differences of the scores of a critic and their gradients."""
    group, result = ranks(), {}
    model = source("llama").scalar()
    torch.manual_seed(0)
    torch.nn.init.normal_(model.lm.score.weight)
    ids, index, _, mask = texts()
    for name, packing in {"padded": None, **packings()}.items():
        compared = []
        for each in (None, group):
            model.sequence_ranks = each
            scores = model(ids, index, packing) * mask
            compared.append((scores.detach(), summed_gradients(scores.square().sum(), model, each)))
        result[name] = [gap(*pair) for pair in zip(compared[1], compared[0], strict=True)]
    return result


def teachers():
    """Return the differences of a teacher's outputs, and of the distillation from them."""
    group, result = ranks(), {}
    model, teacher = source("llama").causal(), source("qwen3").causal()
    ids, index, targets, mask = texts()
    packing, weights = packings()["shared prompts"], torch.linspace(0.5, 1.5, mask.numel()).view(mask.shape)
    taught = mask & (torch.arange(mask.shape[1]) % 3 > 0)  # others have no teacher
    for top_k in (None, 3):
        compared = []
        for each in (None, group):
            model.sequence_ranks = teacher.sequence_ranks = each
            with torch.no_grad():
                outputs = teacher(ids, index, targets, taught, packing=packing, of_targets=TeacherOutputs(top_k, 20))
            if top_k is None:
                distribution = TeacherHead(outputs, teacher.lm.lm_head.weight.detach())
                first = outputs
            else:
                distribution = outputs.map(lambda values: values[taught])
                first = outputs.logprobs
            distillation = Distillation([(distribution, taught)], weights, beta=0.3)
            scores = model(ids, index, targets, mask, packing=packing, of_targets=distillation)
            loss = scores.loss + (scores.logprobs * weights).sum()
            values = torch.stack([scores.logprobs, scores.entropy, scores.divergence]).detach()
            compared.append((first, values, scores.loss.detach(), summed_gradients(loss, model, each)))
        result[str(top_k)] = [gap(*pair) for pair in zip(compared[1], compared[0], strict=True)]
    return result


def checkpointed():
    """Return the differences with recomputed activations, in bfloat16 as autocast computes."""
    group = ranks()
    model = source("qwen2").causal()
    expected, gradients = scores_and_gradients(model, packings()["shared prompts"], None)
    model.train()
    model.lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    values, ours = scores_and_gradients(model, packings()["shared prompts"], group)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded, _ = scores_and_gradients(model, packings()["shared prompts"], group)
    return {"exact": [gap(values, expected), gap(ours, gradients)], "bfloat16": gap(rounded, expected)}


def long_texts(length):
    """Return the differences for two long texts, one of which has targets at its end alone."""
    group = ranks()
    model = source("mistral", sliding_window=700, max_position_embeddings=2 * length).causal()
    ids = torch.randint(VOCABULARY, (2, length), generator=torch.Generator().manual_seed(0))
    lengths = [length, length - 777]
    index = torch.stack([torch.arange(length - 1).clamp(max=each - 2) for each in lengths])
    mask = torch.stack([torch.arange(length - 1) < each - 1 for each in lengths])
    mask[1, : lengths[1] - 60] = False
    compared = []
    for each in (None, group):
        model.sequence_ranks = each
        scores = model(ids, index, ids[:, 1:], mask, packing=pack_texts(lengths, length))
        weights = torch.linspace(-1, 2, mask.numel()).view(mask.shape)
        compared.append((scores.logprobs.detach(), summed_gradients((scores.logprobs * weights).sum(), model, each)))
    return [gap(*pair) for pair in zip(compared[1], compared[0], strict=True)]


def update_of_one_text(tokens):
    """Return the rise of the peak memory in bytes, and the CPU seconds, of an update of one text."""
    # Freed memory returns to the system at once, so that resident memory is memory in use.
    assert ctypes.CDLL("libc.so.6").mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    group = ranks()
    model = source(
        "llama", vocab_size=4096, hidden_size=128, num_attention_heads=8, num_key_value_heads=8,
        intermediate_size=512, num_hidden_layers=2, max_position_embeddings=tokens, initializer_range=0.02,
    ).causal()  # fmt: skip
    model.sequence_ranks = group if group.size > 1 else None
    model.train()

    def update(length):
        ids = torch.randint(4096, (1, length))
        index = torch.arange(length - 1).unsqueeze(0)
        mask = torch.ones(1, length - 1, dtype=torch.bool)
        model(ids, index, ids[:, 1:], mask, packing=pack_texts([length], length)).logprobs.sum().backward()

    update(64)
    before = resource.getrusage(resource.RUSAGE_SELF)
    update(tokens)
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return [(after.ru_maxrss - before.ru_maxrss) * 1024, cpu]
