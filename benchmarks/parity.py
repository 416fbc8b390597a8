"""The same greedy tokens as transformers: real prompts, the same weights, every difference with its top-2 gap.

    python benchmarks/parity.py [--model smollm2-135m-q4_1] [--prompts 20] [--tokens 128] [--json]

Needs the `parity` extra. Tiny random checkpoints of every variant are compared by tests/parity.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kvjax
import serve
from kvjax.check.prompts import prompts as check_prompts
from kvjax.report import Report

TIE = 5e-4  # of logits in float32: two programs may round a pair this close either way


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m-q4_1")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    import torch
    import transformers

    transformers.utils.logging.set_verbosity_error()
    kvjax.compile_cache()
    lm = kvjax.load(args.model, dtype="float32")
    with tempfile.TemporaryDirectory() as directory:
        kvjax.save_hf(lm, Path(directory) / "model", dtype="float32")
        peer = transformers.AutoModelForCausalLM.from_pretrained(
            str(Path(directory) / "model"), dtype=torch.float32
        )
    peer.eval()
    prompts = [list(ids) for ids in check_prompts(lm, args.prompts, 256)]
    facts = {"model": lm.id, "prompts": len(prompts), "tokens": args.tokens, "torch": torch.__version__,
             "transformers": transformers.__version__}  # fmt: skip
    report = Report("greedy tokens beside transformers", facts)
    same = explained = 0
    for start in range(0, len(prompts), 4):
        part = prompts[start : start + 4]
        mine = serve.generate(lm, part, max_new_tokens=args.tokens, stop_ids=(), size=512)
        for i, (ids, answer) in enumerate(zip(part, mine), start):
            with torch.inference_mode():
                theirs = peer.generate(
                    torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                    max_new_tokens=args.tokens, min_new_tokens=args.tokens, pad_token_id=0, eos_token_id=None,
                )[0, len(ids) :].tolist()  # fmt: skip
            at = next((k for k, (a, b) in enumerate(zip(answer.tokens, theirs)) if a != b), None)
            if at is None:
                same += 1
                continue
            with torch.inference_mode():
                logits = peer(torch.tensor([[*ids, *theirs[:at]]])).logits[0, -1]
            gap = float(logits[theirs[at]] - logits[answer.tokens[at]])
            explained += gap <= TIE
            report.row(
                "differences", prompt=i, position=at, ours=answer.tokens[at], theirs=theirs[at], gap=gap
            )
    report.row("summary", prompts=len(prompts), identical=same, near_ties=explained)
    report.bar("prompts neither identical nor a near tie", len(prompts) - same - explained, "<=", 0)
    print(report.as_json() if args.json else report.as_text())
    return report.exit_code


if __name__ == "__main__":
    raise SystemExit(main())
