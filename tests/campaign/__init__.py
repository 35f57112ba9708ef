"""Campaigns inject many faults on purpose and record what happens (`make campaign`, docs/reliability.md).

    PYTHONPATH=tests python -m campaign [kills] [stops] [learns] [disk] [damage] [inputs]
        [--out DIR] [--cases N] [--report FILE]

Each campaign is a module with `cases`, which yields a name and a function for each fault. The function returns one line
of DIR/<campaign>.jsonl, in which `fault` says what went wrong, if anything did. Cases that already have a line are not
run again, so a campaign that was stopped continues.
"""
