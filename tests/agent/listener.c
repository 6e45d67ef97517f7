/* A server for tests inside a sandbox: `listener MODE ADDRESS PORT`. Says "ready" when it listens.
 *   echo   what comes goes back, and the end too
 *   hold   accepts, and reads nothing
 *   talk   sends 3 MB and its end, then reads to the end and says how much that was
 *   reset  reads one byte, then tears the connection
 *   deaf   a backlog of one, and never accepts */
#include <arpa/inet.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int listen_on(const char *address, int port, int backlog)
{
    struct sockaddr_storage to = { 0 };
    struct sockaddr_in *v4 = (struct sockaddr_in *)&to;
    struct sockaddr_in6 *v6 = (struct sockaddr_in6 *)&to;
    socklen_t size = sizeof *v4;
    if (inet_pton(AF_INET, address, &v4->sin_addr) == 1) {
        v4->sin_family = AF_INET;
        v4->sin_port = htons((uint16_t)port);
    } else {
        inet_pton(AF_INET6, address, &v6->sin6_addr);
        v6->sin6_family = AF_INET6;
        v6->sin6_port = htons((uint16_t)port);
        size = sizeof *v6;
    }
    int fd = socket(to.ss_family, SOCK_STREAM, 0), on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (bind(fd, (struct sockaddr *)&to, size) || listen(fd, backlog)) {
        perror(address);
        exit(1);
    }
    puts("ready");
    fflush(stdout);
    return fd;
}

static void echo(int fd)
{
    char data[65536];
    ssize_t n;
    while ((n = read(fd, data, sizeof data)) > 0)
        for (ssize_t at = 0, m; at < n; at += m)
            if ((m = write(fd, data + at, (size_t)(n - at))) < 0)
                return;
}

static void talk(int fd)
{
    static char data[3000000];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (char)(i % 251);
    for (size_t at = 0; at < sizeof data;) {
        ssize_t n = write(fd, data + at, sizeof data - at);
        if (n < 0)
            return;
        at += (size_t)n;
    }
    shutdown(fd, SHUT_WR);
    long got = 0;
    ssize_t n;
    while ((n = read(fd, data, sizeof data)) > 0)
        got += n;
    printf("got %ld\n", got);
    fflush(stdout);
}

static void serve(const char *mode, int fd)
{
    if (!strcmp(mode, "echo")) {
        echo(fd);
    } else if (!strcmp(mode, "talk")) {
        talk(fd);
    } else if (!strcmp(mode, "hold")) {
        pause();
    } else if (!strcmp(mode, "reset")) {
        char one;
        struct linger at_once = { 1, 0 };
        if (read(fd, &one, 1) == 1)
            setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    }
    close(fd);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    int deaf = !strcmp(argv[1], "deaf"), fd = listen_on(argv[2], atoi(argv[3]), deaf ? 0 : 128);
    for (;;) {
        if (deaf)
            pause();
        int one = accept(fd, NULL, NULL);
        if (one < 0)
            continue;
        if (fork() == 0) {
            close(fd);
            serve(argv[1], one);
            _exit(0);
        }
        close(one);
    }
}
