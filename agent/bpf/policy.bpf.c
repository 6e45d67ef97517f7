/* What a sandbox may send and receive: one program on the node's end of each sandbox's veth (tc clsact).
 *
 * Ingress there is what the sandbox sends, raw frames too; egress is what reaches it. Everything is denied but
 * what the maps allow, and nothing is remembered of a flow, so a change of the maps counts for the next packet.
 * Verdicts travel to the router's nftables as marks: it refuses (reset, unreachable) and redirects to the proxy.
 */
#include "helpers.h"

enum { TCP = 6, UDP = 17, ICMP = 1, ICMPV6 = 58, ANY = 0 };
enum { DNS = 53, SPANS = 16, PIN_SPANS = 4, SYN_ONLY = 0x02, TCP_FLAGS = 0x17 };
enum { MARK_PROXY = 0xd5ec0001, MARK_REFUSED = 0xd5ec0002 };
enum { DROP_DENIED = 1 };
enum { PROXIED = 1 };
enum { EVENTS_A_SECOND = 20, EVENTS_BURST = 50 };
#define SECOND 1000000000ULL
#define PIN_IDLE (120 * SECOND) /* an established flow outlives the answer that allowed it */

enum reason { NOT_ALLOWED = 1, SPOOFED, NOT_IP, FRAGMENT, IP_OPTIONS, EXTENSION, MALFORMED, NODE, NEIGHBOUR, INBOUND };
enum verdict { DENY, ALLOW, PROXY };

struct sandbox {
    __u8 address4[4], address6[16], mac[6], pad[2];
    __u32 index, policy, group, flags;
};

struct usage {
    __u64 out_packets, out_bytes, in_packets, in_bytes, denied, unreported, tokens, filled_ns;
};

struct span {
    __u8 protocol, flags, prefix, pad;
    __u16 low, high;
};

struct neighbour {
    __u32 index, group;
};

struct rule_key {
    __u32 prefix, policy;
    __u8 address[16];
};

struct rule {
    __u32 count;
    struct span spans[SPANS];
};

struct special_key {
    __u32 prefix;
    __u8 address[16];
};

struct pin_key {
    __u32 index;
    __u8 address[16];
};

struct pin {
    __u64 expires_ns, last_used_ns;
    __u32 count, pad;
    struct span spans[PIN_SPANS];
};

struct node {
    __u8 gateway4[16], gateway6[16]; /* the first v4-mapped */
};

struct event {
    __u64 time_ns;
    __u32 index, unreported;
    __u8 remote[16];
    __u16 local_port, remote_port;
    __u8 protocol, inbound, reason, pad;
};

#define MAP(name, kind, k, v, entries, flag) \
    struct { \
        __uint(type, kind); \
        __type(key, k); \
        __type(value, v); \
        __uint(max_entries, entries); \
        __uint(map_flags, flag); \
    } name SEC(".maps")

MAP(sandboxes, BPF_MAP_TYPE_HASH, __u32, struct sandbox, 65536, BPF_F_NO_PREALLOC);
MAP(usages, BPF_MAP_TYPE_HASH, __u32, struct usage, 65536, BPF_F_NO_PREALLOC);
MAP(neighbours, BPF_MAP_TYPE_HASH, __u8[16], struct neighbour, 131072, BPF_F_NO_PREALLOC);
MAP(rules, BPF_MAP_TYPE_LPM_TRIE, struct rule_key, struct rule, 262144, BPF_F_NO_PREALLOC);
MAP(special, BPF_MAP_TYPE_LPM_TRIE, struct special_key, __u32, 4096, BPF_F_NO_PREALLOC);
MAP(pins, BPF_MAP_TYPE_HASH, struct pin_key, struct pin, 262144, BPF_F_NO_PREALLOC);
MAP(nodes, BPF_MAP_TYPE_ARRAY, __u32, struct node, 1, 0);

struct {
    __uint(type, BPF_MAP_TYPE_RINGBUF);
    __uint(max_entries, 1 << 18);
} events SEC(".maps");

/* `remote` is the far end, whatever the direction. */
struct packet {
    __u8 local[16], remote[16];
    __u16 local_port, remote_port; /* of ICMP: 0 */
    __u8 protocol, kind;           /* kind: ICMP's type */
    __u8 opens;                    /* a TCP SYN with nothing else */
    __u8 later;                    /* a fragment that carries no ports */
};

static __always_inline bool same(const __u8 *a, const __u8 *b, int n)
{
    for (int i = 0; i < n; i++)
        if (a[i] != b[i])
            return false;
    return true;
}

static __always_inline void mapped(__u8 out[16], const __u8 v4[4])
{
    __builtin_memset(out, 0, 10);
    out[10] = out[11] = 0xff;
    __builtin_memcpy(out + 12, v4, 4);
}

static __always_inline bool icmp(__u8 protocol)
{
    return protocol == ICMP || protocol == ICMPV6;
}

/* Ports, or ICMP's type. 0, or why not. */
static __always_inline int transport(struct __sk_buff *skb, __u32 at, struct packet *p, bool outbound)
{
    __u8 head[14] = { 0 };
    if (p->protocol == TCP ? bpf_skb_load_bytes(skb, at, head, 14) : bpf_skb_load_bytes(skb, at, head, 8))
        return MALFORMED;
    if (icmp(p->protocol)) {
        p->kind = head[0];
        return 0;
    }
    if (p->protocol != TCP && p->protocol != UDP)
        return 0;
    __u16 source = head[0] << 8 | head[1], target = head[2] << 8 | head[3];
    p->local_port = outbound ? source : target;
    p->remote_port = outbound ? target : source;
    p->opens = p->protocol == TCP && (head[13] & TCP_FLAGS) == SYN_ONLY;
    return 0;
}

static __always_inline int parse4(struct __sk_buff *skb, struct packet *p, bool outbound)
{
    __u8 h[20];
    if (bpf_skb_load_bytes(skb, ETH, h, sizeof h) || h[0] >> 4 != 4)
        return MALFORMED;
    if ((h[0] & 15) != 5)
        return IP_OPTIONS;
    p->protocol = h[9];
    mapped(outbound ? p->local : p->remote, h + 12);
    mapped(outbound ? p->remote : p->local, h + 16);
    __u16 fragment = h[6] << 8 | h[7];
    if (fragment & 0x3fff) { /* more follow, or this is not the first */
        if (outbound)
            return FRAGMENT;
        p->later = (fragment & 0x1fff) != 0;
    }
    return p->later ? 0 : transport(skb, ETH + 20, p, outbound);
}

static __always_inline int parse6(struct __sk_buff *skb, struct packet *p, bool outbound)
{
    __u8 h[40];
    if (bpf_skb_load_bytes(skb, ETH, h, sizeof h) || h[0] >> 4 != 6)
        return MALFORMED;
    p->protocol = h[6];
    __builtin_memcpy(outbound ? p->local : p->remote, h + 8, 16);
    __builtin_memcpy(outbound ? p->remote : p->local, h + 24, 16);
    if (p->protocol != TCP && p->protocol != UDP && p->protocol != ICMPV6)
        return EXTENSION;
    return transport(skb, ETH + 40, p, outbound);
}

static __always_inline enum verdict by_span(const struct span *s, const struct packet *p, __u32 prefix)
{
    __u8 protocol = icmp(p->protocol) ? ICMP : p->protocol;
    if (s->prefix < prefix || (s->protocol != ANY && s->protocol != protocol))
        return DENY;
    if (p->later || protocol == ICMP || s->protocol == ANY)
        return ALLOW;
    if (p->remote_port < s->low || p->remote_port > s->high)
        return DENY;
    return s->flags & PROXIED ? PROXY : ALLOW;
}

/* What a rule gives for a network counts only where it is not wider than the special network that holds the
 * address: everything does not mean this node, nor what is private. */
static __always_inline enum verdict by_rules(const struct sandbox *s, const struct packet *p)
{
    struct special_key where = { .prefix = 128 };
    struct rule_key key = { .prefix = 160, .policy = s->policy };
    __builtin_memcpy(where.address, p->remote, 16);
    __builtin_memcpy(key.address, p->remote, 16);
    struct rule *rule = bpf_map_lookup_elem(&rules, &key);
    if (!rule)
        return DENY;
    __u32 *prefix = bpf_map_lookup_elem(&special, &where), need = prefix ? *prefix : 0;
    for (__u32 i = 0; i < SPANS; i++) {
        if (i >= rule->count)
            break;
        enum verdict v = by_span(&rule->spans[i], p, need);
        if (v != DENY)
            return v;
    }
    return DENY;
}

static __always_inline enum verdict by_pins(const struct sandbox *s, const struct packet *p)
{
    struct pin_key key = { .index = s->index };
    __builtin_memcpy(key.address, p->remote, 16);
    struct pin *pin = bpf_map_lookup_elem(&pins, &key);
    if (!pin)
        return DENY;
    __u64 now = bpf_ktime_get_ns();
    if (now >= pin->expires_ns && (p->opens || now >= pin->last_used_ns + PIN_IDLE))
        return DENY;
    for (__u32 i = 0; i < PIN_SPANS; i++) {
        if (i >= pin->count)
            break;
        enum verdict v = by_span(&pin->spans[i], p, 0);
        if (v != DENY) {
            if (now - pin->last_used_ns > SECOND)
                pin->last_used_ns = now; /* not for every packet: the line is shared */
            return v;
        }
    }
    return DENY;
}

static __always_inline bool fill(struct usage *u)
{
    __u64 now = bpf_ktime_get_ns(), more = (now - u->filled_ns) * EVENTS_A_SECOND / SECOND;
    if (more) {
        u->tokens = u->tokens + more > EVENTS_BURST ? EVENTS_BURST : u->tokens + more;
        u->filled_ns = now;
    }
    if (!u->tokens)
        return false;
    u->tokens--;
    return true;
}

static __noinline int tell(struct usage *u, const struct packet *p, __u32 index, __u32 how)
{
    if (!u || !p)
        return 0;
    __sync_fetch_and_add(&u->denied, 1);
    struct event *e = fill(u) ? bpf_ringbuf_reserve(&events, sizeof *e, 0) : NULL;
    if (!e) {
        __sync_fetch_and_add(&u->unreported, 1);
        return 0;
    }
    __builtin_memset(e, 0, sizeof *e);
    e->time_ns = bpf_ktime_get_ns();
    e->index = index;
    e->unreported = u->unreported;
    __builtin_memcpy(e->remote, p->remote, 16);
    e->local_port = p->local_port;
    e->remote_port = p->remote_port;
    e->protocol = p->protocol;
    e->reason = how & 0xff;
    e->inbound = how >> 8 & 1;
    bpf_ringbuf_submit(e, 0);
    return 0;
}

static __always_inline bool to_gateway(const struct packet *p)
{
    __u32 zero = 0;
    struct node *n = bpf_map_lookup_elem(&nodes, &zero);
    return n && (same(p->remote, n->gateway4, 16) || same(p->remote, n->gateway6, 16));
}

static __always_inline bool is_dns(const struct packet *p)
{
    return (p->protocol == UDP || p->protocol == TCP) && p->remote_port == DNS && !p->later;
}

/* ALLOW, PROXY, or DENY with a reason in `why`. */
static __always_inline enum verdict judge(const struct sandbox *s, const struct packet *p, int *why)
{
    *why = NOT_ALLOWED;
    if (to_gateway(p)) {
        *why = NODE;
        return is_dns(p) ? ALLOW : DENY;
    }
    struct neighbour *n = bpf_map_lookup_elem(&neighbours, p->remote);
    if (n) {
        *why = NEIGHBOUR;
        return n->group && n->group == s->group ? ALLOW : DENY;
    }
    enum verdict v = by_rules(s, p);
    return v != DENY ? v : by_pins(s, p);
}

static __always_inline int parse(struct __sk_buff *skb, struct packet *p, bool outbound)
{
    if (skb->vlan_present)
        return NOT_IP;
    if (skb->protocol == HOST16(0x0800))
        return parse4(skb, p, outbound);
    return skb->protocol == HOST16(0x86dd) ? parse6(skb, p, outbound) : NOT_IP;
}

/* Neighbour discovery, router solicitations, multicast reports: every kernel sends them; nobody need hear of it. */
static __always_inline bool chatter(const struct packet *p)
{
    return p->remote[0] == 0xff || (p->protocol == ICMPV6 && p->kind >= 130 && p->kind <= 143);
}

SEC("tc")
int from_sandbox(struct __sk_buff *skb)
{
    __u32 ifindex = skb->ifindex;
    struct sandbox *s = bpf_map_lookup_elem(&sandboxes, &ifindex);
    struct usage *u = bpf_map_lookup_elem(&usages, &ifindex);
    struct packet p = { 0 };
    __u8 frame[ETH];
    if (!s || !u || bpf_skb_load_bytes(skb, 0, frame, sizeof frame))
        return TC_ACT_SHOT;
    int why = parse(skb, &p, true);
    __u8 own4[16];
    mapped(own4, s->address4);
    if (chatter(&p))
        return TC_ACT_SHOT;
    if (why == NOT_IP) {
        __sync_fetch_and_add(&u->denied, 1);
        return TC_ACT_SHOT;
    }
    if (!why && (!same(frame + 6, s->mac, 6) || !(same(p.local, own4, 16) || same(p.local, s->address6, 16))))
        why = SPOOFED;
    if (!why && icmp(p.protocol) && p.kind != 8 && p.kind != 128)
        why = NOT_ALLOWED; /* of ICMP a sandbox sends echo requests */
    if (why) {
        tell(u, &p, s->index, why);
        return TC_ACT_SHOT;
    }
    enum verdict v = judge(s, &p, &why);
    if (v != DENY) {
        __sync_fetch_and_add(&u->out_packets, 1);
        __sync_fetch_and_add(&u->out_bytes, skb->len);
        skb->mark = v == PROXY ? MARK_PROXY : 0;
        return TC_ACT_OK;
    }
    tell(u, &p, s->index, why);
    skb->mark = MARK_REFUSED;
    return s->flags & DROP_DENIED ? TC_ACT_SHOT : TC_ACT_OK;
}

/* Errors of ICMP, which end or mend a flow, and answers to pings. */
static __always_inline bool welcome_icmp(const struct packet *p, bool *error)
{
    *error = p->protocol == ICMP ? p->kind == 3 || p->kind == 11 || p->kind == 12 : p->kind >= 1 && p->kind <= 4;
    return *error || p->kind == 0 || p->kind == 129;
}

SEC("tc")
int to_sandbox(struct __sk_buff *skb)
{
    __u32 ifindex = skb->ifindex;
    struct sandbox *s = bpf_map_lookup_elem(&sandboxes, &ifindex);
    struct usage *u = bpf_map_lookup_elem(&usages, &ifindex);
    struct packet p = { 0 };
    if (!s || !u || parse(skb, &p, false))
        return TC_ACT_SHOT;
    __u8 own4[16];
    bool error = false;
    mapped(own4, s->address4);
    if (!same(p.local, own4, 16) && !same(p.local, s->address6, 16))
        return TC_ACT_SHOT;
    int why = INBOUND;
    struct neighbour *n = bpf_map_lookup_elem(&neighbours, p.remote);
    bool grouped = n && n->group && n->group == s->group;
    bool pass = skb->mark == MARK_REFUSED || grouped;
    if (!pass && icmp(p.protocol) && !p.later && !welcome_icmp(&p, &error))
        pass = false;
    else if (!pass && error)
        pass = true;
    else if (!pass && !p.opens)
        pass = judge(s, &p, &why) != DENY;
    if (!pass) {
        tell(u, &p, s->index, INBOUND | 1 << 8);
        return TC_ACT_SHOT;
    }
    __sync_fetch_and_add(&u->in_packets, 1);
    __sync_fetch_and_add(&u->in_bytes, skb->len);
    return TC_ACT_OK;
}

char _license[] SEC("license") = "Dual BSD/GPL";
