"""The command `rainband`: one file per command, and the views they share."""
