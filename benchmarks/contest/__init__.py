"""How contenders are run, timed and compared: workers, plans for the peaks of others, results and their rows."""
