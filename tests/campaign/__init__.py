"""Campaigns inject many faults on purpose and record what happens (`make campaign`, docs/reliability.md).

    PYTHONPATH=tests python -m campaign [kills] [stops] [disk] [damage] [inputs] [--out DIR] [--cases N] [--report FILE]

Each campaign is a module with `cases`, which yields a name and a function for each fault; what the function returns is
one line of DIR/<campaign>.jsonl, and `fault` in it says what went wrong, if anything did. Cases that have a line there
are not run again: a campaign that was stopped goes on where it was.
"""
