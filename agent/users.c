/* Users and groups of the image. Its files are hostile: regular files only, and bounded. */
#include "worker.h"

#include <ctype.h>
#include <stdio.h>
#include <sys/stat.h>

enum { FILE_LIMIT = 1 << 20 };

static char *slurp(const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    struct stat st;
    char *text = NULL;
    if (fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (text = malloc(FILE_LIMIT + 1)) != NULL) {
        size_t n = 0;
        for (ssize_t r; n < FILE_LIMIT && (r = read(fd, text + n, FILE_LIMIT - n)) > 0;)
            n += (size_t)r;
        text[n] = 0;
        char *fit = realloc(text, n + 1);
        text = fit ? fit : text;
    }
    if (fd >= 0)
        close(fd);
    return text;
}

/* Splits one line at colons into at most `most` fields; the number of fields. */
static int fields_of(char *line, char **out, int most)
{
    int n = 0;
    for (char *p = line; n < most;) {
        out[n++] = p;
        if (!(p = strchr(p, ':')))
            break;
        *p++ = 0;
    }
    return n;
}

static bool number(const char *s, unsigned *out)
{
    if (!*s || strlen(s) > 10)
        return false;
    for (const char *p = s; *p; p++)
        if (!isdigit((unsigned char)*p))
            return false;
    unsigned long v = strtoul(s, NULL, 10);
    *out = (unsigned)v;
    return v < UINT32_MAX;
}

static bool find_user(char *text, const char *name, struct identity *out)
{
    unsigned wanted = 0, uid, gid;
    bool by_number = number(name, &wanted);
    char *state = NULL;
    for (char *line = text ? strtok_r(text, "\n", &state) : NULL; line; line = strtok_r(NULL, "\n", &state)) {
        char *f[7];
        if (fields_of(line, f, 7) < 6 || !number(f[2], &uid) || !number(f[3], &gid))
            continue;
        if (strcmp(f[0], name) && !(by_number && uid == wanted))
            continue;
        out->uid = uid;
        out->gid = gid;
        snprintf(out->name, sizeof out->name, "%s", f[0]);
        snprintf(out->home, sizeof out->home, "%s", f[5]);
        return true;
    }
    if (by_number) {
        out->uid = wanted;
        out->gid = 0;
    }
    return by_number;
}

static bool in_members(char *members, const char *name)
{
    char *state = NULL;
    for (char *m = strtok_r(members, ",", &state); m; m = strtok_r(NULL, ",", &state))
        if (!strcmp(m, name))
            return true;
    return false;
}

/* Supplementary groups, or with `wanted` the one group that is asked for. */
static bool find_groups(char *text, struct identity *out, const char *wanted)
{
    unsigned gid, exact = 0;
    bool found = wanted && number(wanted, &exact);
    if (found)
        out->gid = exact;
    char *state = NULL;
    for (char *line = text ? strtok_r(text, "\n", &state) : NULL; line; line = strtok_r(NULL, "\n", &state)) {
        char *f[4];
        if (fields_of(line, f, 4) < 4 || !number(f[2], &gid))
            continue;
        if (wanted && !found && !strcmp(f[0], wanted)) {
            out->gid = gid;
            return true;
        }
        if (!wanted && out->name[0] && out->n_groups < 63 && in_members(f[3], out->name))
            out->groups[out->n_groups++] = gid;
    }
    return found;
}

/* The name of a uid (or gid, in /etc/group); empty when it has none. */
void name_of_id(const char *file, unsigned id, char out[64])
{
    char *text = slurp(file), *state = NULL;
    unsigned n;
    out[0] = 0;
    for (char *line = text ? strtok_r(text, "\n", &state) : NULL; line; line = strtok_r(NULL, "\n", &state)) {
        char *f[4];
        if (fields_of(line, f, 4) >= 3 && number(f[2], &n) && n == id) {
            snprintf(out, 64, "%s", f[0]);
            break;
        }
    }
    free(text);
}

int find_identity(const char *spec, struct identity *out)
{
    *out = (struct identity){ 0 };
    char copy[128];
    const char *wanted = *spec ? spec : *self.cfg.user ? self.cfg.user : "0";
    if (strlen(wanted) >= sizeof copy) /* the image's own may be of any length, too */
        return ENOENT;
    strcpy(copy, wanted);
    char *group = strchr(copy, ':');
    if (group)
        *group++ = 0;
    char *text = slurp("/etc/passwd");
    bool ok = find_user(text, copy, out);
    free(text);
    if (!ok && !strcmp(copy, "root"))
        ok = true; /* an image with no passwd still has its root */
    if (!ok)
        return ENOENT;
    text = slurp("/etc/group");
    if (group)
        ok = find_groups(text, out, group);
    else
        find_groups(text, out, NULL);
    free(text);
    if (!ok)
        return ENOENT;
    if (!out->name[0])
        snprintf(out->name, sizeof out->name, "%s", out->uid ? "" : "root");
    if (!out->home[0])
        snprintf(out->home, sizeof out->home, "%s", out->uid ? "/" : "/root");
    return 0;
}
