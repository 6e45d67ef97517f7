"""EROFS metadata of our own making: a layer is a `meta` image and the blobs that it refers to.

    meta    superblock at 1024 | device slots | inodes, xattrs, small files, tails, small directories
            | blocks of large directories and long symbolic links
    blob    bodies of files, whole blocks of 4096 bytes, named by its SHA-256; nothing else

The kernel mounts it: mount(meta, target, "erofs", MS_RDONLY, "device=BLOB0,device=BLOB1"), in the order of
`Stats.blobs`. Linux 6.12 and later take plain files, earlier ones want block devices. mount(2) takes a page
of options; for more blobs there is fsconfig(2), with one `device` a call and paths of at most 255 bytes.

The kernel's, which we keep to: every structure on disk (`format`), names of a directory in order of their
bytes, inline data within one block, the device table, and the unified address space: meta's own blocks
first, then each blob's, so that a file of one run can lie in a blob and have its tail in meta. A file of
several runs or with holes has an index of chunks instead, and its last block padded, in a blob.

Ours:
  - the digest of a blob, in hex, is the tag of its device slot;
  - block 0 is the metadata's start (meta_blkaddr 0), so that no inode has the number 0, which readdir skips;
  - inodes are the extended ones: the compact ones have one time for all. Xattrs are never shared;
  - no build time, no label: the same tree and uuid give the same bytes.

`tree` is the model, `writer` and `reader` go to disk and back, `data` makes blobs, `merge` lays one layer on
another as an overlay does. Nothing here mounts, and nothing is trusted that is read.
"""
