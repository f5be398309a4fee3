"""A real federation on Flower: the app that SuperLink and SuperNodes run, and what a deployment needs around it.

The terms, the members' training, the upload, its checks and the fusion are those of a federation by file; Flower is
one more road for the one file.
"""
