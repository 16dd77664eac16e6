# First layer of the node image: the Debian root that build_base.py made.
FROM scratch
ADD rootfs.tar /
