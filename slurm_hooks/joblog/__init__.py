"""From a job's own log to a cause with names in it.

``read`` takes bounded pieces of a file, ``scan`` finds the lines worth reading in them and matches
them against ``signatures``, ``attribute`` says which of them is the cause and which are its
cascade, ``verdict`` writes the answer down. Only ``read`` does I/O.
"""
