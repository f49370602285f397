"""Break the code in small named ways, one at a time in a copy, and see that a test notices each.

    python tests/mutants.py            all of them; exit status 1 if one survives
    python tests/mutants.py mask save  those whose name holds one of the words

A mutant is (name, file, text as it is, text as it is broken, tests to try). The text must stand in the file
exactly once, so that a mutant that no longer fits the code is found as well.
"""

import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1800  # seconds for the tests of one mutant


def left_out(folder: str, names: list[str]) -> list[str]:
    """What a copy does without: hidden folders, runs, and prepared data sets."""
    below_data = Path(folder) == ROOT / "data"
    return [n for n in names if n[0] in "._" and n != "__init__.py" or n in ("runs", "wandb")
            or below_data and (Path(folder) / n).is_dir()]  # fmt: skip


KERNEL, GROUPED, LATENT, CACHE, ROTARY = (
    f"attention/{name}.py" for name in ("kernel", "grouped", "latent", "cache", "rotary")
)
ATTENTION = ["tests/test_attention.py"]
MLA = ["tests/test_latent.py"]
MODEL = ["tests/test_model.py"]
TRAIN = ["tests/test_train.py"]
CHECKPOINT = ["tests/test_checkpoint.py"]
DAMAGE = ["tests/faults/test_damage.py"]
DISK = ["tests/faults/test_disk.py"]
HOSTILE = ["tests/test_hostile.py"]
EVALUATE = ["tests/test_evaluate.py"]
OPTIM = ["tests/test_optim.py"]
MUON = ["tests/test_muon.py"]
LOADER = ["tests/test_loader.py"]
RANKS = ["tests/test_ranks.py"]
TOKENFILE = ["tests/test_tokenfile.py"]
SETTINGS = ["tests/test_settings.py"]
LAUNCHER = ["tests/test_launcher.py"]
LOGBOOK = ["tests/test_logbook.py"]
SAMPLE = ["tests/test_sample.py"]
GENERATE = ["tests/test_generate.py"]
PROBES = ["tests/test_probes.py"]
HEADSCORES = ["tests/test_headscores.py"]
HEADSTUDY = ["tests/test_headstudy.py"]
STATS = ["tests/test_stats.py"]
SPEED = ["tests/test_speed.py"]
DESIGNS = ["tests/test_designs.py"]
COMPARE = ["tests/test_compare.py"]
REPORT = ["tests/test_report.py"]
SYSTEMS = ["tests/test_systems.py"]
CONVERT = ["tests/test_convert.py"]
HUGGINGFACE = ["tests/test_huggingface.py"]
REGROUP = ["tests/test_regroup.py"]
UPTRAIN = ["tests/test_uptrain.py"]
SAMPLE = ["tests/test_sample.py"]
HEADPAGE = ["tests/test_headpage.py"]
PREPARE = ["tests/test_prepare.py"]
PREPARATION = ["tests/faults/test_preparation.py"]
SOURCES = ["tests/test_sources.py"]

MUTANTS = [
    (
        "query head j reads K/V head j mod g (scratch)", KERNEL,
        "    q = q.reshape(B, n_kv_head, rows, head_dim)  # a",
        "    k, v = (t.repeat(1, n_head // n_kv_head, 1, 1) for t in (k, v))\n"
        "    n_kv_head, rows = n_head, T\n    q = q.reshape(B, n_kv_head, rows, head_dim)  # a",
        ATTENTION,
    ),
    (
        "query head j reads K/V head j mod g (fused)", KERNEL,
        "        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=n_head != n_kv_head, scale=scale)",
        "        k, v = (t.repeat(1, n_head // n_kv_head, 1, 1) for t in (k, v))\n"
        "        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)",
        ATTENTION,
    ),
    ("the mask hides a query's own key", KERNEL, ".tril(S - T)", ".tril(S - T - 1)", ATTENTION),
    ("the mask shows the next key", KERNEL, ".tril(S - T)", ".tril(S - T + 1)", ATTENTION),
    ("the mask is aligned upper left", KERNEL, ".tril(S - T)", ".tril()", ATTENTION),
    ("cached steps use is_causal", KERNEL, "    if T == S and not narrow:\n", "    if True:\n", ATTENTION),
    ("scores are not scaled", KERNEL, " * (scale or 1 / math.sqrt(head_dim))", "", ATTENTION),
    ("softmax over queries", KERNEL, "F.softmax(scores, dim=-1)", "F.softmax(scores, dim=-2)", ATTENTION),
    ("attention dropout does nothing", KERNEL, "F.dropout(weights, dropout)", "weights", ATTENTION),
    (
        "K/V are copied for every query head (scratch)", KERNEL,
        "    q = q.reshape(B, n_kv_head, rows, head_dim)  # a",
        "    k, v = (t.repeat_interleave(n_head // n_kv_head, 1) for t in (k, v))\n"
        "    n_kv_head, rows = n_head, T\n    q = q.reshape(B, n_kv_head, rows, head_dim)  # a",
        ATTENTION,
    ),
    (
        "K/V are copied for every query head (cached)", KERNEL,
        "    q = q.reshape(B, n_kv_head, group * T, head_dim)\n",
        "    k, v = (t.repeat_interleave(group, 1) for t in (k, v))\n"
        "    mask = mask if mask is None else mask[:T]\n",
        ATTENTION,
    ),
    ("the cache's position is stale", "model.py", "start = cache.length if cache else 0", "start = 0", MODEL),
    ("the cache overwrites its beginning", CACHE, "buffer[:, :, start:end] = part",
     "buffer[:, :, : part.size(-2)] = part", ATTENTION),
    ("the window is one too long", KERNEL, "mask.triu(S - T - window + 1)", "mask.triu(S - T - window)", ATTENTION),
    ("fused attention forgets the window", KERNEL, "narrow = window is not None and window < S", "narrow = False", ATTENTION),
    ("a ring is written past its window's oldest", CACHE, "buffer[:, :, start % self.slots, None] = part",
     "buffer[:, :, (start + 1) % self.slots, None] = part", ATTENTION),
    ("a chunk forgets what it saw before", CACHE, "torch.arange(max(0, start - self.slots + 1), start)",
     "torch.arange(start, start)", ATTENTION),
    ("a long chunk leaves the ring as it was", CACHE, "            buffer[:, :, kept % self.slots] = part[:, :, kept - start]\n",
     "            pass\n", ATTENTION),
    ("the cache ignores the window", "model.py", "LayerCache(batch_size, room, shapes, self.head.weight, window)",
     "LayerCache(batch_size, room, shapes, self.head.weight)", MODEL),
    ("FLOPs ignore the window", "model.py", "        window = min(self.config.window or context, context)\n",
     "        window = context\n", MODEL),
    ("a setting of another design is ignored", "model.py", "if field.name in others and", "if False and", MODEL),
    ("the gate comes from the heads' sum", GROUPED, "heads * self.w_gate(x).sigmoid()",
     "heads * self.w_gate(x).sigmoid().mean(-1, keepdim=True)", ATTENTION),
    ("a latent's scores forget the rotary width", LATENT, "math.sqrt(config.head_dim + self.rope_dim)",
     "math.sqrt(config.head_dim)", MLA),
    ("the latent is not normed", LATENT, "F.rms_norm(self.w_dkv(x), (self.kv_rank,))", "self.w_dkv(x)", MLA),
    ("the rotary key is not turned", LATENT, "rotate(q_rotary, *rope), rotate(k_rotary, *rope)",
     "rotate(q_rotary, *rope), k_rotary", MLA),
    ("what is cached is expanded", LATENT, "if rows.size(2) == T else", "if True else", MLA),
    ("W_UV is not applied to the weighted latent of its head", LATENT, "@ w_uv.transpose(-2, -1)",
     "@ w_uv.flip(0).transpose(-2, -1)", MLA),
    ("a latent is counted in its absorbed form", LATENT, "return config.n_head * (2 * config.head_dim + (config.rope_dim or 0))",
     "return config.n_head * (2 * config.kv_rank + (config.rope_dim or 0))", MODEL),
    ("the cache keeps query heads", GROUPED, "return [(config.n_kv_head, config.head_dim)] * 2",
     "return [(config.n_head, config.head_dim)] * 2", ATTENTION),
    ("rotary turns backwards", ROTARY, "torch.cat((-sin, sin), dim=-1)", "torch.cat((sin, -sin), dim=-1)",
     ATTENTION + MODEL),
    ("rotary turns values, not keys", GROUPED, "q, k = rotate(q, *rope), rotate(k, *rope)",
     "q, v = rotate(q, *rope), rotate(v, *rope)", ATTENTION + MODEL),
    ("attention dropout stays on the fused path", GROUPED, ' or config.attention_dropout > 0', "", ATTENTION),
    ("w_o is always there", GROUPED, "            if config.w_o\n", "            if True\n", ATTENTION + MODEL),
    ("initial values ignore the name", "model.py", 'f"{seed}/{name}"', 'f"{seed}"', MODEL + ATTENTION),
    ("initial values ignore the seed", "model.py", 'f"{seed}/{name}"', 'f"{name}"', MODEL + ATTENTION),
    ("the residual around attention is lost", "model.py", "x = x + self.dropout(self.attn(self.norm_attn(x), rope, cache))",
     "x = self.dropout(self.attn(self.norm_attn(x), rope, cache))", MODEL),
    ("post-norm is pre-norm", "model.py", 'config.norm_position == "pre"\n        self.norm_attn',
     'True\n        self.norm_attn', MODEL),
    ("ReLU^2 is ReLU", "model.py", "F.relu(h) * h", "F.relu(h)", MODEL),
    ("the head is not tied", "model.py", "            self.head.weight = self.embed.weight", "            pass", MODEL),
    ("GPT-2's outputs are not scaled by depth", "model.py", "0.02 / math.sqrt(2 * self.config.n_layer) if is_output",
     "0.02 if is_output", MODEL),
    ("blocks do not begin as the identity", "model.py", "0.0 if is_output", "0.02 if is_output", MODEL),
    ("FLOPs leave out the backward pass", "model.py", "return 6 * weights", "return 2 * weights", MODEL),
    ("chance forgets the window", "lab/headscores.py", ".triu(1 - (window or T))", "", HEADSTUDY),
    ("dropout is not keyed to the step", "train.py",
     "                torch.manual_seed(stable_seed(config.seed, step, micro))", "                pass", TRAIN),
    ("slices of a batch are means of their own", "train.py", 'forward(x, y, reduction="sum") / counted',
     'forward(x, y) / accumulation', PROBES),
    ("every micro-batch is the first", "train.py", "zip(micro_batches, inputs.split(micro_batch_size), targets",
     "zip(micro_batches, [inputs[:micro_batch_size]] * len(micro_batches), targets", TRAIN),
    ("every rank takes the first rows", "runtime/ranks.py", "range(self.rank * own, (self.rank + 1) * own)",
     "range(own)", RANKS),
    ("gradients are not added up", "runtime/ranks.py", "            tensor.copy_(part", "            (part", RANKS),
    ("each rank counts its own targets", "train.py", "int(ranks.gather((targets != IGNORED).sum().item()).sum())",
     "ranks.count * int((targets != IGNORED).sum())", RANKS),
    ("each rank evaluates everything", "train.py", "start + ranks.rank * share, min(stop, start + (ranks.rank + 1) *",
     "start, min(stop, start + ranks.count *", RANKS),
    ("a rank goes its own way at a signal", "train.py", "int(ranks.gather(stop.number).max())", "stop.number", RANKS),
    ("the optimiser's state is not resumed", "train.py",
     "        load_optimizer_tensors(model, optimizer, crop_positions(tensors, block_size))",
     "        pass", TRAIN),
    ("the gradient is not clipped", "train.py", "config.grad_clip or math.inf", "math.inf", TRAIN),
    ("every evaluation is the best", "train.py", "if result.loss < best_loss:", "if True:", TRAIN),
    ("a run that diverged goes on", "train.py", "if not math.isfinite(loss + norm):", "if False:", TRAIN),
    ("the last evaluation is a short one", "train.py", "record(result + score(part, None, log.evaluating) if part < whole else result)",
     "record(result)", TRAIN),
    ("the first step has no learning rate", "runtime/optim.py", "(step + 1) / config.warmup_steps",
     "step / config.warmup_steps", OPTIM),
    ("norms and biases decay", "runtime/optim.py", '"weight_decay": 0.0', '"weight_decay": config.weight_decay', OPTIM),
    ("the last partial window is dropped", "runtime/evaluate.py", "while at < stop:",
     "while stop - at >= block_size:", EVALUATE),
    ("dropout stays on in evaluation", "runtime/evaluate.py", "    model.eval()\n", "", EVALUATE),
    ("bits per byte count the inputs", "runtime/evaluate.py", "int(token_bytes[counted].sum())",
     "int(token_bytes[ids[targets != IGNORED]].sum())", EVALUATE),
    ("a save is renamed before it is synced", "runtime/files.py", "            os.fsync(file.fileno())\n", "", CHECKPOINT),
    ("a save deletes the former one first", "runtime/checkpoint.py", "        os.rename(folder, old)  #",
     "        shutil.rmtree(folder)  #", CHECKPOINT),
    ("memory is taken before the weights are compared", "runtime/checkpoint.py",
     "    check_sizes(config, tensors, folder)\n", "", HOSTILE),
    ("readers of pickles are used", "data/sources.py", "not in HUB_KINDS", "in ()", HOSTILE),
    ("a JSON file is read whatever its size", "data/tokenfile.py", "if info.st_size > MOST_BYTES:", "if info.st_size > MOST_BYTES and 1 / 0:", HOSTILE),
    ("a checksum is not compared", "runtime/checkpoint.py",
     "hashlib.sha256(content).hexdigest() != meta", "False and meta", CHECKPOINT),
    ("a damaged meta is read", "runtime/checkpoint.py", 'if meta["sha256"].get("meta.json") not in', 'if False and meta not in', DAMAGE),
    ("values that are not finite are saved", "runtime/checkpoint.py", "if not v.isfinite().all()", "if False", CHECKPOINT),
    ("a full disk does not say for which file", "runtime/files.py", "    with naming(path):\n", "    if True:\n", CHECKPOINT),
    ("a stop between the two renames loses the checkpoint", "runtime/checkpoint.py",
     '(run / name, run / f"{name}.old", run / name)', "(run / name,)", CHECKPOINT),
    ("every pass has the same order", "data/loader.py", "default_rng((self.seed, number))",
     "default_rng((self.seed, 0))", LOADER),
    ("every seed has the same order", "data/loader.py", "default_rng((self.seed, number))",
     "default_rng((0, number))", LOADER),
    ("a pass ends with its whole windows", "data/loader.py", "math.ceil((len(tokens) - 1) / block_size)", "self.whole", LOADER),
    ("a pass forgets what lies before its offset", "data/loader.py", "self.tokens.window(0, offset)", "self.tokens.window(0, 0)", LOADER),
    ("empty places of a window count", "data/loader.py", "        block[1] = IGNORED  #", "        #", LOADER),
    ("targets are the inputs", "data/tokenfile.py", "targets = ids[1:].copy()", "targets = ids[:-1].copy()", LOADER),
    ("a token file's length is not checked", "data/tokenfile.py", "if size != expected:", "if False:", TOKENFILE),
    ("a token file gets its name before it is synced", "data/tokenfile.py",
     "                os.fsync(file.fileno())\n", "                pass\n", TOKENFILE),
    ("an earlier settings file wins", "runtime/settings.py", "given |= values", "given = values | given", SETTINGS),
    ("files win over the shell", "runtime/settings.py", "return given | checked,", "return checked | given,",
     SETTINGS),
    ("an order takes eight bytes a window", "data/loader.py", "np.min_scalar_type(max(self.whole, 1 << 16))",
     "np.int64", LOADER),
    ("what a killed preparation left stays", "prepare.py", "            clear_leftovers(folder)\n", "", PREPARATION),
    ("the data set that a killed preparation moved away is lost", "prepare.py",
     '                put_back(aside / "old", folder)\n', "", PREPARATION),
    ("what another process is preparing is cleared away", "prepare.py", "            if dead:\n", "            if True:\n", PREPARATION),
    ("more rows of the hub are read than were asked for", "data/sources.py", "None if first is None else int(first)", "None", SOURCES),
    ("true is a whole number", "runtime/settings.py", "type(value) is self.type", "isinstance(value, self.type)", SETTINGS),
    ("rows of steps that were never saved stay in the log", "runtime/logbook.py", 'if step < last_step or',
     'if step < 10**9 or', LOGBOOK),
    ("a damaged line of the log is dropped", "runtime/logbook.py", "            if content.count(b", "            continue\n            if content.count(b", LOGBOOK),
    ("a run saved by a wrong clock is the newest for ever", "runtime/prompts.py", "(times[path] <= now, times[path])", "times[path]", SAMPLE),
    ("evaluations count as training time", "runtime/logbook.py", "            self._zero += time.perf_counter() - self._paused_at\n",
     "            pass\n", LOGBOOK),
    ("all samples share one random stream", "runtime/generate.py", 'f"{seed}/sample/{k}"', 'f"{seed}/sample"', GENERATE),
    ("padded vocabulary slots are drawn", "runtime/generate.py", "[:n, :vocab_size]", "[:n]", GENERATE),
    ("top_p leaves out the token that reaches it", "runtime/generate.py", "before >= top_p", "before + falling >= top_p", GENERATE),
    ("the window slides by every token", "runtime/generate.py", "return stride * math.ceil(max(0, length - block_size) / stride)",
     "return max(0, length - block_size)", GENERATE),
    ("the window moves and the cache stays", "runtime/generate.py", "            cache.clear()\n", "            pass\n", GENERATE),
    ("half a character is written", "runtime/generate.py", 'decode_bytes([token]))',
     'decode_bytes([token]), final=True)', GENERATE),
    ("initial values follow the data's seed", "train.py", "config.seed if config.init_seed is None else config.init_seed",
     "config.seed", TRAIN),
    ("Holm is Bonferroni", "lab/stats.py", "(comparisons - rank) * p_values[name]", "comparisons * p_values[name]", STATS),
    ("p is not adjusted", "lab/stats.py", "(comparisons - rank) * p_values[name]", "p_values[name]", STATS),
    ("the interval has n degrees of freedom", "lab/stats.py", "t_test(mean, sd / math.sqrt(n), n - 1)",
     "t_test(mean, sd / math.sqrt(n), n)", STATS),
    ("the smallest detectable difference forgets the family", "lab/stats.py", "t_quantile(n - 1, LEVEL / comparisons)",
     "t_quantile(n - 1, LEVEL)", STATS),
    ("a sign that turned is settled", "lab/stats.py", '    if half["mean"] * differences[-1]["mean"] < 0:', "    if False:", STATS),
    ("a loss that falls is settled", "lab/stats.py", "if fall > FALL else None", "if False else None", STATS),
    ("the loss is the best one", "lab/stats.py", 'last["step"], last["val_loss"],', 'last["step"], min(r["val_loss"] for r in rows),', STATS),
    ("the flags do not win over a design's file", "lab/designs.py", "base | (contents(file) if file else {}) | flags",
     "base | flags | (contents(file) if file else {})", DESIGNS),
    ("a run is finished before its last evaluation", "lab/sweep.py", ' and row.get("val_tokens") == self.val_tokens', "", COMPARE),
    ("what is finished is trained again", "lab/sweep.py", "                    if run.finished():", "                    if False:", COMPARE),
    ("another setting joins the same folder", "lab/sweep.py", "        if was != now:", "        if False:", COMPARE),
    ("a job is stopped without its run", "lab/launcher.py", "                if process:\n                    process.terminate()\n", "                pass\n",
     LAUNCHER),
    ("a job that Slurm lost is begun anew by it", "lab/launcher.py", '"no-requeue": True', '"requeue": True', LAUNCHER),
    ("a job is told to save when its time is up", "lab/launcher.py", 'f"TERM@{save_seconds}"', '"TERM@0"', LAUNCHER),
    ("a hub that is gone after its first answer is waited for", "data/sources.py", "            ask_hub(name)  # slow, or gone?", "            pass", SOURCES),
    ("the hub is waited for as long as it likes", "data/sources.py", "asking.join(HUB_SECONDS)", "asking.join(40)", SOURCES),
    ("a read-only disk is told in the system's words", "runtime/errors.py", '    errno.EROFS: "the disk is read-only; choose another folder",\n', "", DISK),
    ("a file too long is told in the system's words", "runtime/errors.py",
     '    errno.EFBIG: "the file grows beyond what the system allows; raise the limit (ulimit -f)",\n', "", DISK),
    ("a full disk is told without the file", "runtime/errors.py", "error.filename = error.filename or str(path)", "pass", DISK),
    ("others may write where the job files lie", "lab/launcher.py", " or info.st_mode & 0o022", "", LAUNCHER),
    ("a run takes itself for one of torchrun's", "lab/sweep.py", "for name, value in os.environ.items() if name not in ALONE", "for name, value in os.environ.items()",
     LAUNCHER),
    ("threads are mixed", "lab/plans.py", "        if threads not in (None, saved):", "        if False:", COMPARE),
    ("a comparison takes all cores", "lab/plans.py", "min(4, cores)", "cores", COMPARE),
    ("jobs forget a folder's threads", "lab/plans.py", "min(most, cores // threads)", "most", COMPARE),
    ("speed is measured on one job's threads", "compare.py", "min(jobs, torch.get_num_threads() // run.threads)", "1", COMPARE),
    ("speeds are compared whatever the machine did", "lab/answers.py", "if most > UNEVEN else None", "if False else None", REPORT),
    ("parameters are matched to a tenth", "lab/plans.py", "abs(total / target - 1) > 0.005", "abs(total / target - 1) > 1", COMPARE),
    ("rates are chosen on a reported seed", "compare.py", "RATE_SEED = 0", "RATE_SEED = 1", COMPARE),
    ("fillers of recall are any values", "data/probes.py", "np.take_along_axis(values, random.integers(0, pairs, (count, length)), axis=1)",
     "random.integers(1 + half, 1 + 2 * half, (count, length))", PROBES),
    ("every word of a probe counts", "data/tokenfile.py", "        if self.counted:\n            targets", "        if False:\n            targets", PROBES),
    ("windows cut a probe's examples", "data/loader.py", "0 if self.tokens.counted else offset", "offset", PROBES),
    ("induction looks at the same token", "lab/headscores.py", "duplicates(ids).roll(1, dims=1)", "duplicates(ids).roll(0, dims=1)", HEADSCORES),
    ("queries with nothing to find count", "lab/headscores.py", "[..., asked].mean(dim=-1)", ".mean(dim=-1)", HEADSCORES),
    ("a class is not weighed by its frequency", "lab/headscores.py", "return weight / share if", "return weight if", HEADSCORES),
    ("the bias is a share of a head", "lab/taps.py", "found.append(out[:-1] - out[-1])", "found.append(out[:-1])", HEADSTUDY),
    ("heads are zeroed where they should be means", "lab/headstudy.py", "put(some, values[layer])", "put(some, 0 * values[layer])", HEADSTUDY),
    ("a probe is measured in part", "heads.py", "(len(dataset.val) if dataset.probe else TOKENS)", "TOKENS", HEADSTUDY),
    ("the answer is read at the first word", "lab/headreport.py", "[0, -1, : part.tokenizer", "[0, 0, : part.tokenizer", HEADSTUDY),
    ("a name needs no more than its threshold", "lab/headstudy.py", "value >= NAMED_FROM and value >= TIMES_CHANCE * chance", "value >= NAMED_FROM", HEADSTUDY),
    ("heads of a type go one by one", "lab/headstudy.py", "ablations(fused, random, list(types.values()), zeros, on_random)",
     "ablations(fused, random, [[g[0]] for g in types.values()], means, on_random)", HEADSTUDY),
    ("d_ff does not follow its ratio", "model.py", 'self.d_ff or round(ratio * self.n_embd), self.h', 'self.d_ff or 4 * self.n_embd, self.h', SYSTEMS),
    ("K/V heads do not follow their ratio", GROUPED, "if config.heads_per_kv and n_kv_head * group != config.n_head:", "if False:", SYSTEMS),
    ("cache bytes are always float32's", "lab/describe.py", "costs = count(config, cache_dtype)", "costs = count(config)", SYSTEMS),
    ("the way shows as many K/V heads as heads", "lab/describe.py", '"split into heads: k", ("B", n_kv_head,', '"split into heads: k", ("B", config.n_head,', SYSTEMS),
    ("GPT-2's layers are not transposed", "runtime/huggingface.py", "    transposed=True,", "    transposed=False,", HUGGINGFACE),
    ("Nemotron's norms are stored whole", "runtime/huggingface.py", "    shifted=True,", "    shifted=False,", HUGGINGFACE),
    ("queries, keys and values lie in another order", "runtime/huggingface.py", "torch.cat(list(some.values()))",
     "torch.cat(list(some.values())[::-1])", HUGGINGFACE),
    ("a setting that no layout states is let through", "runtime/huggingface.py", "name not in free and getattr(config, name) != value",
     "name in self.own and getattr(config, name) != value", HUGGINGFACE),
    ("norms' biases of theirs are left out without a word", "runtime/huggingface.py", "not config.bias and tensor.any()", "False", HUGGINGFACE),
    ("an end-of-text token is read out of exported text", "runtime/huggingface.py", '"split_special_tokens": True', '"split_special_tokens": False', HUGGINGFACE),
    ("a head that differs is tied all the same", "runtime/huggingface.py", 'values["tie_embeddings"] = False', "pass", HUGGINGFACE),
    ("a shard may lie anywhere", "runtime/huggingface.py", r"[\w.-]+\.safetensors", "(?s:.*)", HUGGINGFACE),
    ("weights need not be numbers", "runtime/huggingface.py", "not tensor.float().isfinite().all()", "False", HUGGINGFACE),
    ("a tokenizer may change the text", "data/tokenizer.py", "        if not same:\n", "        if False:\n", HUGGINGFACE),
    ("an empty name is the current folder", "convert.py", 'if value == "":', "if False:", CONVERT),
    ("a prompt goes without the token that begins a text", "runtime/prompts.py", "[*tokenizer.begin, *ids]", "ids", HUGGINGFACE),
    ("an arc is named beside the best fixed word", "lab/headstudy.py", 'max(arc["best_distance_met"], arc["best_word_met"])', 'arc["best_distance_met"]', HEADSTUDY),
    ("windows weigh alike, however few targets they have", "lab/taps.py", "rows.append(each.sum(dim=1))", "rows.append(each.sum(dim=1) * (y != IGNORED).sum() / len(y) / (targets != IGNORED).sum(dim=1))", HEADSTUDY),
    ("heads of other data are measured without a word", "heads.py", "check_data(dataset, meta, run, exact=True)", "check_data(dataset, meta, run, exact=False)", HEADSTUDY),
    ("keys are turned the other way", "attention/regroup.py", "angle = product.angle()", "angle = -product.angle()", REGROUP),
    ("values are turned and w_o is not", "attention/regroup.py", 'new["w_o.weight"] = columns.flatten(1).to(layer["w_o.weight"])', "pass", REGROUP),
    ("the first head is the last", "attention/regroup.py", "group[:, 0]", "group[:, -1]", REGROUP),
    ("a run from another's weights takes the default data set", "runtime/runs.py", 'saved = {"dataset": own["name"]}', "saved = {}", TRAIN),
    ("a data set is taken for that of a run that was brought in", "runtime/runs.py", 'not own["fingerprint"] or ', "", CONVERT),
    ("a window as long as the context is passed over", "train.py", "window >= block_size", "window > block_size", TRAIN),
    ("a ratio that was given is told as none", "runtime/settings.py", "value = given.get(f.name) if value is None else value", "pass", SETTINGS),
    ("a terminal gets a description's JSON", "bench.py", "if not (config.describe and sys.stdout.isatty()):", "if True:", SYSTEMS),
    ("MLA's keys are told without their rotary part", "lab/describe.py", "config.head_dim + (config.rope_dim or 0)  # of q and k", "config.head_dim", SYSTEMS),
    ("uptrain's losses are drawn from 1 to 10", "uptrain.py", "scale=alt.Scale(zero=False)", 'scale=alt.Scale(zero=False, type="log")', UPTRAIN),
    ("Muon's iteration forgets its fifth power", "runtime/muon.py", "torch.baddbmm(S, S, S, beta=b, alpha=c)", "b * S", MUON),
    ("Muon's updates shrink with the shape", "runtime/muon.py", "UPDATE_RMS * math.sqrt(shape.numel()) / (update.norm() + 1e-7)", "UPDATE_RMS", MUON),
    ("Muon's momentum is plain", "runtime/muon.py", "p.grad.lerp(mean.lerp_(p.grad, 1 - beta), beta)", "mean.lerp_(p.grad, 1 - beta)", MUON),
    ("AdamW updates Muon's matrices as well", "runtime/optim.py", "                continue\n", "", MUON),
    ("Muon's matrices do not decay", "runtime/muon.py", "p.mul_(1 - lr * weight_decay)", "p", MUON),
    ("Muon takes the tables", "runtime/optim.py", '"weight_decay": config.weight_decay, "muon": False', '"weight_decay": config.weight_decay, "muon": config.optimizer == "muon"', MUON),
    ("the average of the weights stands still", "train.py", "            optimizer.average(step)\n", "", TRAIN),
    ("the weights in training are evaluated", "train.py", "        with optimizer.averaged():\n            own", "        if True:\n            own", TRAIN),
    ("the weights in training are saved as the model", "train.py", "log.pause(), optimizer.averaged()", "log.pause()", TRAIN),
    ("a resumed run trains the average", "runtime/optim.py", '    optimizer.exchange("training", "average")\n', "", TRAIN),
    ("the first steps weigh no more than others", "runtime/optim.py", "max(1 - self.ema_decay, 9 / (10 + step))", "1 - self.ema_decay", ["tests/test_optim.py"]),
    ("a folder in use is read before it is refused", "train.py", "            lock = hold(Path(former))  # before", "            pass  # before", ["tests/faults/test_kill.py"]),
    ("the lock empties what has its name", "runtime/runs.py", 'open(path, "a")', 'open(path, "w")', ["tests/faults/test_kill.py"]),
    ("a lock may be a link", "runtime/files.py", "path.is_symlink() or path.exists()", "path.exists()", ["tests/faults/test_kill.py"]),
    ("a run killed between two renames is begun anew", "runtime/checkpoint.py", 'for name in ("last", "last.old"))', 'for name in ("last",))', ["tests/faults/test_kill.py"]),
    ("a run that another process takes is a failure", "lab/sweep.py", "if status == 2 and (run.held() or run.finished()):", "if False:", COMPARE),
    ("a save during a read is damage", "runtime/checkpoint.py", "if now == before:", "if True:", ["tests/faults/test_kill.py"]),
    ("all logits of a large vocabulary are held", "model.py", "self.config.vocab_size < LARGE_VOCABULARY", "self.config.vocab_size < 2 * LARGE_VOCABULARY", MODEL),
    ("a small vocabulary is sliced", "model.py", "self.config.vocab_size < LARGE_VOCABULARY", "self.config.vocab_size < 0", MODEL),
    ("evaluation forgets all slices but one", "runtime/evaluate.py", "nats += losses", "nats = losses", EVALUATE),
    ("a terminal obeys what a model says", "sample.py", "    if sys.stdout.isatty():\n", "    if False:\n", SAMPLE),
    ("names move the cursor", "runtime/errors.py", "return UNSEEN.sub(lambda found: ascii(found[0])[1:-1], text)", "return text", LOGBOOK),
    ("a page obeys what it shows", "lab/page.py", "return html.escape(plain(text))", "return plain(text)", REPORT),
    ("a job begins its run anew", "lab/sweep.py", "        if has_saved(self.folder):\n            return [sys", "        if False:\n            return [sys", LAUNCHER),
    ("a job that ended without a word was well", "lab/launcher.py", "self.status_file.exists() else 1", "self.status_file.exists() else 0", LAUNCHER),
    ("a job is killed where it should be told to save", "lab/launcher.py", "os.kill(int(self.job.job_id), signal.SIGTERM)", "os.kill(int(self.job.job_id), signal.SIGKILL)", LAUNCHER),
    ("jobs may lie behind a link", "lab/launcher.py", "folder.lstat()", "folder.stat()", LAUNCHER),
    ("a job's pickle is read", "lab/launcher.py", "            self.returncode = int(self.status_file", "            self.job.exception()\n            self.returncode = int(self.status_file", LAUNCHER),
    ("a text is read whole", "data/sources.py", "block = file.read(PIECE)", "block = file.read()", PREPARE),
    ("rows are read whole", "data/sources.py", "enumerate(lines, start=1)", "enumerate(lines.readlines(), start=1)", PREPARE),
    ("Parquet is read whole", "data/sources.py", "iter_batches(batch_size=64", "iter_batches(batch_size=10**6", PREPARE),
    ("Parquet is read by row groups", "data/sources.py", "pre_buffer=False, buffer_size=PIECE", "pre_buffer=True", PREPARE),
    ("a long row is one piece", "data/sources.py", "        yield text[start : start + PIECE]", "        yield text\n        return", PREPARE),
    ("ids wait in memory for their file", "data/tokenfile.py", 'open(self._aside, "wb")', 'open(self._aside, "wb", buffering=1 << 26)', PREPARE),
    ("a data set is deleted before the new one is there", "prepare.py", "                os.replace(folder, old)", "                shutil.rmtree(folder)", PREPARATION),
    ("a full disk does not say for which meta.json", "prepare.py", "with errors.naming(path), open(path", "with open(path", PREPARATION),
    ("a pass draws with replacement", "data/loader.py", "            random.shuffle(order)\n", "            order[:] = random.integers(self.per_pass, size=self.per_pass)\n", LOADER),
    ("what was read is kept", "data/tokenfile.py", "        return np.frombuffer(parts[0] if", "        self.__dict__.setdefault('kept', []).extend(parts)\n        return np.frombuffer(parts[0] if", LOADER),
    ("a checksum is taken of the whole file at once", "data/tokenfile.py", "def sha256(self, chunk: int = 1 << 20)", "def sha256(self, chunk: int = 1 << 40)", TOKENFILE),
    ("the largest id is looked for in the whole file at once", "data/tokenfile.py", "def max_id(self, chunk: int = 1 << 20)", "def max_id(self, chunk: int = 1 << 40)", TOKENFILE),
    ("each rank has an order of its own", "train.py", "config.batch_size, config.seed)", "config.batch_size, config.seed + ranks.rank)", RANKS),
    ("a hub data set is downloaded whole", "data/sources.py", "yield from builder.as_streaming_dataset(split=split)", "builder.download_and_prepare()\n        yield from builder.as_dataset(split=split)", SOURCES),
    ("the end of a command waits for the hub", "data/sources.py", "super().__init__(daemon=True)", "super().__init__(daemon=False)", SOURCES),
    ("a wrong name is taken for no network", "data/sources.py", "if isinstance(error, huggingface_hub.errors.RepositoryNotFoundError):", "if False:", SOURCES),
    ("the best loss is forgotten by a resumed run", "train.py", 'meta["step"], meta["best_loss"] or math.inf', 'meta["step"], math.inf', TRAIN),
    ("the renames of a save are not synced", "runtime/checkpoint.py", "    _sync_folder(folder.parent)\n", "", CHECKPOINT),
    ("the log is shortened in place", "runtime/logbook.py", '        aside = path.with_name(path.name + ".tmp")\n', "        aside = path\n", LOGBOOK),
    ("the log goes by the clock on the wall", "runtime/logbook.py", "self._zero = time.perf_counter() - earlier", "self._zero, time.perf_counter = time.time() - earlier, time.time", ["tests/faults/test_mishaps.py"]),
    ("two runs may hold one folder", "runtime/runs.py", "fcntl.LOCK_EX | fcntl.LOCK_NB", "fcntl.LOCK_SH | fcntl.LOCK_NB", ["tests/faults/test_kill.py"]),
    ("two comparisons may hold one folder", "compare.py", "    lock = hold(out_dir)\n", "    lock = hold(out_dir)\n    lock.close()\n", COMPARE),
    ("wandb may take its time to begin", "runtime/logbook.py", "init_timeout=limit, ", "", LOGBOOK),
    ("an error of wandb's own ends the run", "runtime/logbook.py", "                call(self._wandb)\n        except Exception", "                call(self._wandb)\n        except OSError", LOGBOOK),
    ("a batch that numpy cannot hold is a fault of ours", "runtime/errors.py", "isinstance(error, (MemoryError, torch_oom))", "isinstance(error, torch_oom)", ["tests/test_errors.py"]),
    ("memory on Windows is a fault of ours", "runtime/errors.py", '"not enough memory"', '"no such words"', ["tests/test_errors.py"]),
    ("a save does not look at the losses before it", "train.py", "        if unseen:\n            look()\n        if name", "        if name", TRAIN),
    ("token files are not compared with what was prepared", "train.py", "    dataset.verify()\n", "", TRAIN),
    ("weights may be a pickle", "runtime/checkpoint.py", "return safetensors.torch.load(content)", "return safetensors.torch.load(content) if content[:2] != b'PK' else torch.serialization.load(path)", ["tests/test_structure.py"]),
    ("a header is read as long as it says", "runtime/checkpoint.py", "file.read(min(length, MOST_BYTES))", "file.read(length)", HOSTILE),
    ("tables of any length are made", "runtime/checkpoint.py", "if tables > TABLES +", "if False and tables > TABLES +", HOSTILE),
    ("more targets than tokens", "data/__init__.py", "not 1 <= targets <= tokens", "targets < 1", HOSTILE),
    ("settings of any length are read", "runtime/settings.py", "MOST_BYTES = 2**20", "MOST_BYTES = 2**30", HOSTILE),
    ("dropout goes by a rank's own count", "train.py", "zip(micro_batches, inputs.split", "zip(range(len(micro_batches)), inputs.split", RANKS),
    ("every gradient is a message of its own", "runtime/ranks.py", "            self._told(dist.all_reduce, together)", "            for one in together.split([t.numel() for t in tensors]):\n                self._told(dist.all_reduce, one)", RANKS),
    ("all ranks print", "train.py", "silent=not ranks.first", "silent=False", RANKS),
    ("all ranks save", "train.py", "        if not ranks.first:\n            return\n", "", RANKS),
    ("what one rank cannot share is not refused", "runtime/ranks.py", "        if batch_size % self.count:\n", "        if False:\n", RANKS),
    ("ranks may have settings of their own", "train.py", '    ranks.agree("settings and data", f"{model_config} {config} {dataset.fingerprint}")\n', "", RANKS),
    ("a lost rank goes unnoticed", "runtime/ranks.py", "            call(argument)\n        except (RuntimeError, ValueError) as error:\n", "            call(argument)\n        except (RuntimeError, ValueError) as error:\n            return\n", RANKS),
    ("Ctrl-C is not heard", "runtime/runs.py", "for number in (signal.SIGINT, signal.SIGTERM):", "for number in (signal.SIGTERM,):", RANKS),
    ("the last windows of a shared evaluation are left out", "train.py", "share = math.ceil((stop - start)", "share = math.floor((stop - start)", RANKS),
    ("cells of a table are markup", "lab/page.py", "<td>{escape(c)}</td>", "<td>{c}</td>", REPORT),
    ("heads of columns are markup", "lab/page.py", '<button type="button">{escape(key)}', '<button type="button">{key}', REPORT),
    ("figures of a table are markup", "lab/page.py", '">{escape(c[0])}</td>', '">{c[0]}</td>', REPORT),
    ("data may end its script", "lab/page.py", '.replace("<", "\\\\u003c")', "", REPORT),
    ("a sample of text is markup", "lab/report.py", "<pre>{html.escape(parts[1])}</pre>", "<pre>{parts[1]}</pre>", REPORT),
    ("text of heads.html is markup", "lab/headpage.py", "<p>{e(m[\"text\"])}</p>", "<p>{m[\"text\"]}</p>", HEADPAGE),
    ("a script writes markup", "lab/headscript.py", "    if (cell) told.textContent = cell[4]", "    if (cell) told.insertAdjacentHTML('beforeend', cell[4])", HEADPAGE),
    ("a closed terminal does not reach a curve's training", "runtime/runs.py", 'numbers = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}', "numbers = {signal.SIGTERM}", UPTRAIN),
    ("a preparation goes on when its training was stopped", "runtime/runs.py", "        with exit_on_signals():\n", "        if True:\n", TRAIN),
    ("two curves share a folder", "uptrain.py", "lock = hold(out)", 'lock = open(out / "lock", "w")', UPTRAIN),
    ("a link leads a write out of a run", "runtime/files.py", '        path.unlink(missing_ok=True)\n        with open(path, "xb")', '        with open(path, "wb")', HOSTILE),
    ("a stranger's log may be a link", "runtime/logbook.py", 'check_own(self.path, "the log of a run")', "pass", HOSTILE),
    ("a run saves over the one that took its folder", "train.py", "        check_held(lock, out_dir)\n", "", TRAIN),
    ("a closed terminal ends a run at once", "runtime/runs.py", "            signal.signal(hangup, self._note)", "            pass", TRAIN),
    ("what is said to a closed terminal fails", "runtime/runs.py", "            drop_output(*(s for s in (sys.stdout, sys.stderr) if not is_file(s)))", "            pass", TRAIN),
    ("a file of what is said ends with its terminal", "runtime/runs.py", " if not is_file(s))", ")", TRAIN),
    ("a signal handled in C fails a preparation", "runtime/runs.py", "handler not in (signal.SIG_IGN, None)", "handler != signal.SIG_IGN", TRAIN),
    ("a pipe is read for weights", "runtime/checkpoint.py", "if path.exists() and not path.is_file():  # a pipe", "if path.exists() and not path.is_file() and 1 / 0:  # a pipe", HOSTILE),
    ("preparations that end at once do not wait", "prepare.py", "with held(folder.parent, wait=True):  # two that", "with contextlib.nullcontext():  # two that", PREPARATION),
    ("who lost the last checkpoint is told to lose the best", "runtime/checkpoint.py", 'if (run / "best" / "meta.json").is_file():', "if False:", CHECKPOINT),
    ("closed streams are a fault", "runtime/errors.py", "        if getattr(sys, name) is None:", "        if False:", ["tests/test_errors.py"]),
    ("a comparison ends with one run's folder", "lab/sweep.py", "there = run.output.is_file()", "there = True", LAUNCHER),
    ("regrouped runs keep their old keys", "runtime/regrouping.py", "for name, tensor in found.items()", 'for name, tensor in found.items() if "w_k" not in name', UPTRAIN),
]  # fmt: skip


def try_mutant(mutant: tuple[str, str, str, str, list[str]]) -> tuple[str, str]:
    """Name and what happened: the test that failed, or why the mutant is a failure of ours."""
    name, file, right, wrong, tests = mutant
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=left_out)
        source = (copy / file).read_text(encoding="utf-8")
        if source.count(right) != 1:
            return name, f"STALE: {file} holds its text {source.count(right)} times"
        (copy / file).write_text(source.replace(right, wrong), encoding="utf-8")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "-n0", *tests],
                cwd=copy, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, timeout=LIMIT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return name, f"BROKEN: its tests had not ended after {LIMIT} s"
    if done.returncode == 0:
        return name, "SURVIVED " + " ".join(tests)
    failed = [line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if done.returncode != 1 or not failed or failed[0].startswith("ERROR"):
        return name, f"BROKEN: pytest ended with {done.returncode}: {(done.stdout + done.stderr).strip()[-200:]}"
    return name, failed[0].removeprefix("FAILED ")


def main(words: list[str]) -> int:
    chosen = [mutant for mutant in MUTANTS if not words or any(word in mutant[0] for word in words)]
    begin, bad = time.time(), 0
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for number, (name, outcome) in enumerate(pool.map(try_mutant, chosen), 1):
            bad += outcome.startswith(("SURVIVED", "STALE", "BROKEN"))
            print(f"{number}/{len(chosen)} {name}: {outcome}", flush=True)
    print(f"{len(chosen) - bad} of {len(chosen)} mutants caught in {time.time() - begin:.0f} s")
    return bool(bad or not chosen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
