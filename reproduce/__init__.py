"""Reproductions of claims in papers: each script prints its result next to the claim and draws a figure."""
