"""Makes the drafter that the options name."""

import json
import logging
from pathlib import Path
from typing import Any

from baton.engine.core.drafting import Chosen, Drafter, Paced
from baton.engine.core.kvcache import DraftKv
from baton.engine.core.lookahead import Lookahead
from baton.engine.core.prediction import Prediction
from baton.engine.core.prompt_lookup import PromptLookup
from baton.engine.core.protocol import Runner
from baton.engine.core.speculation import PREDICTION
from baton.engine.core.step_costs import ASSUMED, NO_UPKEEP
from baton.engine.core.toy import ToyRunner
from baton.engine.facts.fingerprint import check_sums, tokenizer_fingerprint
from baton.engine.measure_steps import copy_seconds, step_line, upkeep
from baton.engine.options import Options

log = logging.getLogger(__name__)
BRANCHING = ("prompt_lookup", "draft", "heads")  # methods that know more than one way to go on
BESIDE = {"draft": "-draft", "heads": "-head"}  # method → after the name of a model's folder: the folder of a draft that nobody names


def draft_folder(options: Options) -> Path:
    """The model that drafts, or the head; or the model's own folder, if a head may be in there. Raises ValueError, which names the key, if
    nobody names one and none lies beside the model."""
    engine = options.engine
    if engine.draft_model is not None:
        return Path(engine.draft_model)
    beside = options.path.with_name(options.path.name + BESIDE[engine.speculation])
    if (beside / "config.json").is_file():
        return beside
    if engine.speculation == "heads" and _config(options.path).draft_layers:
        return options.path
    raise ValueError(f"engine.draft_model: engine.speculation {engine.speculation} needs one; there is no {beside}")


def draft_kv(options: Options) -> DraftKv | None:
    """What the draft adds to a block, without its fingerprint: known without its weights. Raises ValueError as `draft_folder`."""
    if options.engine.speculation not in BESIDE:
        return None
    alone, folder = options.engine.speculation == "draft", draft_folder(options)
    c = _config(folder if alone else options.path)
    return DraftKv("", options.model.dtype, c.layers if alone else 1, c.kv_heads, c.head_dim, c.kv_parts, c.kv_value_dim)


def pair(runner: Runner, options: Options) -> None:
    """Loads the draft or the head, and gives it a part of each block of `runner`, which has no pool yet. The options are settled.

    Raises ValueError, which names the key, for one that does not fit the model.
    """
    from baton.engine.runner import ModelRunner

    method = options.engine.speculation
    if not isinstance(runner, ModelRunner):
        raise ValueError(f"engine.speculation: {method}: the toy has none")
    (_pair_draft if method == "draft" else _pair_head)(runner, options, draft_folder(options))


def _pair_head(runner: Any, options: Options, folder: Path) -> None:
    from baton.engine.head_drafter import HeadDrafter

    try:
        check_sums(folder)
        engine = options.engine
        others = engine.speculation_branches - 1
        drafter = HeadDrafter.load(runner, options.path, folder, engine.draft_dtype, engine.speculation_tokens, others)
    except (ValueError, OSError) as error:
        raise ValueError(f"engine.draft_model: {error}") from None
    runner.pair(drafter)


def _pair_draft(runner: Any, options: Options, folder: Path) -> None:
    from baton.engine.choice import load
    from baton.engine.draft_model import DraftModel
    from baton.engine.model.config_json import read_config
    from baton.engine.runner import ModelRunner

    engine, longest = options.engine, options.model.max_model_len or runner.max_positions
    try:
        check_sums(folder)
        config = read_config(folder)
        if tokenizer_fingerprint(folder) != tokenizer_fingerprint(options.path):
            raise ValueError(f"{folder} has another tokenizer than {options.path}")
        if config.vocab != runner.vocab_size:
            raise ValueError(f"{folder} has a vocabulary of {config.vocab} tokens, the model has {runner.vocab_size}")
        if config.max_positions < longest:
            raise ValueError(f"{folder} has a context of {config.max_positions} tokens, a sequence may have {longest}")
        draft = load(ModelRunner, options.but(path=str(folder), weight_dtype=engine.draft_dtype, kv_dtype="auto"))
    except (ValueError, OSError) as error:
        raise ValueError(f"engine.draft_model: {error}") from None
    kind: type[DraftModel] = DraftModel
    if runner.on_device:
        from baton.engine.device_draft import DeviceDraft

        kind = DeviceDraft
    runner.pair(kind(draft, engine.speculation_tokens, engine.speculation_branches - 1))


def exact(runner: Runner) -> bool:
    """Whether several tokens in a step have the bits that one has."""
    return runner.separates_output or isinstance(runner, ToyRunner)


def make_drafter(options: Options, runner: Runner, longest: int) -> Drafter | None:
    """Call it when the runner has its pool, and the engine does not run yet: steps are measured, if there is a method. For what clients
    predict alone, nobody waits for that."""
    engine, methods = options.engine, dict[str, Drafter]()
    most, bound, said = engine.limits.max_num_seqs, engine.speculation_tokens, dict[str, Any]()
    others = engine.speculation_branches - 1
    if engine.predictions and exact(runner):
        methods[PREDICTION] = Prediction()
    match engine.speculation:
        case "prompt_lookup":
            methods["prompt_lookup"] = PromptLookup(others)
        case "lookahead":
            methods["lookahead"] = Lookahead()
        case "draft" | "heads":
            from baton.engine.draft_model import DraftModel
            from baton.engine.head_drafter import HeadDrafter
            from baton.engine.runner import ModelRunner

            assert isinstance(runner, ModelRunner) and isinstance(runner.draft, DraftModel | HeadDrafter), "pair them first"
            methods[engine.speculation] = runner.draft
            costs = runner.draft.measure(most)
            said["draft"], said["drafts"] = costs.one.points, costs.several.points
    if not methods:
        return None
    step, branch_s, beside = ASSUMED, 0.0, NO_UPKEEP
    if engine.speculation != "none" and not isinstance(runner, ToyRunner):
        step = step_line(runner, min(2 * most, engine.limits.speculation_batch_tokens), bound, longest)
        said["beside"] = beside = upkeep(runner, step, most, longest)
        if others:
            said["branch"] = branch_s = copy_seconds(runner)
    log.info("how many guesses a step gets follows from: %s", json.dumps({"step": step.points, **said}))
    paced = {name: Paced(method, bound, step, others, branch_s, beside) for name, method in methods.items()}
    return Chosen(paced, engine.speculation, bound)


def _config(folder: Path) -> Any:
    """The `ModelConfig` of a folder; the toy's process does not load torch."""
    from baton.engine.model.config_json import read_config

    return read_config(folder)
