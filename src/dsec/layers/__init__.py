"""Environment layers: EROFS images, how they are built, and the store that keeps them.

`LayerStore(path)` finds layers; `build.Builder(store)` makes them.
"""
