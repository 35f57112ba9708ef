"""Run faiss-cpu's flat index on given features, in the environment that peers.py makes, without bace.

    python faiss_peer.py FEATURES.npy K REPEAT OUT.npy

writes the K nearest rows of every row, including itself, and prints the seconds of the fastest search.
"""

import sys
import time

import faiss
import numpy as np

faiss.omp_set_num_threads(1)
features, k, repeat = np.load(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
times = []
for _ in range(repeat):
    begun = time.process_time()
    index = faiss.IndexFlatL2(features.shape[1])
    index.add(features)
    _, found = index.search(features, k)
    times.append(time.process_time() - begun)
np.save(sys.argv[4], found)
print(min(times))
