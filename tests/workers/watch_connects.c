/* Stands before every connect() of a process that has it preloaded: writes where to, then lets it happen.
 *
 * CONNECTS: the file that gets a line for each address of the internet, "FAMILY ADDRESS PORT".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

int connect(int socket, const struct sockaddr *address, socklen_t size)
{
    char text[INET6_ADDRSTRLEN] = "?", line[128];
    unsigned port = 0;

    if (address->sa_family == AF_INET) {
        const struct sockaddr_in *to = (const struct sockaddr_in *)address;
        inet_ntop(AF_INET, &to->sin_addr, text, sizeof text);
        port = ntohs(to->sin_port);
    } else if (address->sa_family == AF_INET6) {
        const struct sockaddr_in6 *to = (const struct sockaddr_in6 *)address;
        inet_ntop(AF_INET6, &to->sin6_addr, text, sizeof text);
        port = ntohs(to->sin6_port);
    }
    if (address->sa_family == AF_INET || address->sa_family == AF_INET6) {
        int file = open(getenv("CONNECTS"), O_WRONLY | O_CREAT | O_APPEND, 0600);
        int length = snprintf(line, sizeof line, "%d %s %u\n", address->sa_family, text, port);
        if (write(file, line, length) != length)
            abort();
        close(file);
    }
    return ((int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "connect"))(socket, address, size);
}
