"""What `bace COMMAND --help` prints. (`bace run --help` lists the settings, and is made from them.)"""

PAGES = {
    "demo": """\
bace demo [--out DIR]

Compares SEQ, ER, BaCE and MTL on the embedded digits with 3 seeds: a table, and a page DIR/report.html.

  --out DIR     where the runs are kept, `demo` if not given; what is finished there is not run again
""",
    "compare": """\
bace compare --method M [M ...] [--seeds N] [--seed FIRST] [--out DIR] [--config FILE.yaml] [settings]

Runs each method with each seed and prints a table; the page is DIR/report.html. The same command continues where it was
stopped: finished runs are not run again, one that was cut off is resumed.

  --method M    names of `bace list methods`, with hyper-parameters if wanted ("BaCE(alpha=0.5, K=3)"); `all` is every
                method that takes the data, in the order of their results
  --seeds N     how many seeds, 1 if not given
  --seed FIRST  the first of them, 0 if neither this nor the file gives it
  --out DIR     where the runs are kept, `comparison` if not given
  --config FILE settings from a file; those of the command line win. If it names the method, --method may be left out
  --trust       a method of your own that the file names may be imported, which runs its code

All settings of `bace run --help` are taken and hold for every method, but hyper-parameters belong in the brackets:
  bace compare --benchmark digits --method ER BaCE "BaCE(alpha=0)" --seeds 3 --train.epochs 3 --out runs/digits
""",
    "report": """\
bace report DIR [DIR ...] [--out FILE]

Prints the table of runs and writes their page. A DIR is a run folder, or a folder of run folders such as `bace compare`
makes. Seeds of one setting share a row; settings that differ between runs are compared on the page.

  --out FILE    the page, `report.html` if not given: one file, to be opened, mailed or printed
""",
    "list": """\
bace list methods|benchmarks|backbones [--json]

What can be named on the command line, with what it takes and where it is from.

  --json        the same for programs
""",
    "check": """\
bace check data [NAME] [--path DIR] [--json]
bace check backbone NAME [--json]

`data` says for each public set whether it is here and complete, and if not how to get it. NAME is a set or a benchmark;
if given, a set that is missing or has other numbers than published is an error (exit status 2). `backbone` loads an
encoder, passes an example through it and says its width, parameters, input and licence. NAME is one of
`bace list backbones`, a folder, a weights file or a hub id.

  --path DIR    a folder that holds a folder for each set; the one that the environment variable BACE_DATA names is
                searched as well
  --json        the same for programs
""",
    "predict": """\
bace predict RUN FILE [FILE ...] [--json] [--trust] [--force]

What the model of a finished run makes of new data: a line for each picture, or for each line of text files, with its
class or its entities. RUN is the folder of one run, made by `bace run --out RUN`, or in the folder of a comparison.

  --json        a JSON object a line; for entities with words, tags and positions
  --trust       a method of your own that RUN names may be imported, which runs its code
  --force       predict though run.json was changed after the run
""",
}
