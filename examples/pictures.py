"""Pictures: a classifier learns five digits in January and five more in February.

The same on the command line, with the folders that this example writes:

    bace learn model digits/january --new --backbone digits-vit
    bace learn model digits/february
    bace predict model digits/february/test/7
"""

from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

import bace

# These pictures stand for your own: a folder for each month, and in it a folder for each class.
digits = load_digits()
for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
    month = "january" if label < 5 else "february"
    split = "test" if number % 5 == 0 else "train"
    folder = Path("digits", month, split, str(label))
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((pixels * 255 / 16).astype("uint8")).save(folder / f"{number}.png")


def accuracy(learner: bace.Learner, month: str) -> str:
    pictures = sorted(Path("digits", month, "test").glob("*/*.png"))
    return f"{learner.score(pictures, [picture.parent.name for picture in pictures]):.1%}"


learner = bace.Learner(backbone="digits-vit")  # it chooses a method that suits the data
learner.partial_fit("digits/january")
print(f"after January: {accuracy(learner, 'january')} of January's test pictures are recognised")
learner.save("pictures-model")

learner = bace.Learner.load("pictures-model")  # a month later; January's pictures may be deleted now
learner.partial_fit("digits/february")
print(f"after February: {accuracy(learner, 'january')} of January's, {accuracy(learner, 'february')} of February's")
learner.save("pictures-model")

some = sorted(Path("digits/february/test").glob("*/*.png"))[::60]
for picture, label in zip(some, learner.predict(some), strict=True):
    print(f"{picture} is recognised as {label}")
