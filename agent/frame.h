/* Frames: docs/protocol.md. Pure functions over bytes. */
#ifndef DSEC_FRAME_H
#define DSEC_FRAME_H

#include "mp.h"

enum {
    PROTOCOL_VERSION = 1,
    FRAME_HEADER = 12,
    FRAME_MAX = 1 << 20,
    WINDOW = 256 << 10,
    UPLOAD_WINDOW = 1 << 20,
    MAX_COMMAND = 256 << 10,
    MAX_ARGS = 1 << 20,
};

enum frame_type {
    F_HELLO = 1, F_START, F_ATTACH, F_STARTED, F_DATA, F_ACK, F_EOF, F_RESULT, F_ERROR, F_FORGET, F_SIGNAL,
    F_RESIZE, F_PING, F_PONG, F_EVENT, F_LIST, F_OPERATIONS, F_CONFIG = 20, F_BYE = 21,
};

enum { S_STDIN, S_STDOUT, S_STDERR, S_CONTENT, STREAMS };

struct frame {
    uint32_t channel;
    uint8_t type, flags;
    const uint8_t *payload;
    uint32_t length;
};

/* Bytes of the first whole frame at p; 0 when there is none yet; -1 on a breach of the protocol. */
long frame_decode(const uint8_t *p, size_t n, struct frame *out);
void frame_head(uint8_t out[FRAME_HEADER], uint32_t length, uint32_t channel, uint8_t type, uint8_t flags);
void frame_put(struct buf *b, uint32_t channel, uint8_t type, uint8_t flags, const void *p, size_t n);
void frame_put_u64(struct buf *b, uint32_t channel, uint8_t type, uint8_t flags, uint64_t v);
uint64_t frame_u64(const struct frame *f); /* UINT64_MAX when the payload is not 8 bytes */

#endif
