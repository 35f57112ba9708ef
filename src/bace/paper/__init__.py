"""The paper's tables, figures and claims: what to run, what the paper prints, and what our runs say."""
