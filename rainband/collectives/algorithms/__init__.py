"""All-reduce algorithms, one file each; `rainband explain NAME` prints the file's text."""
