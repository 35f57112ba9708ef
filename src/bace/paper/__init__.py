"""The paper's tables, figures and claims: what to run, what was printed, what our runs say."""
