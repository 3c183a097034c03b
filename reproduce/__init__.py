"""Claims of the papers, one script each: it prints its number next to the claim and draws a figure."""
