/* Preloaded: PyTorch's autograd threads pause after they have told the program that a pass is done, and before they let go
   of it, as they may on a busy machine. */
#define _GNU_SOURCE
#include <pthread.h>
#include <string.h>
#include <unistd.h>

void _ZNSt18condition_variable10notify_oneEv(void *condition) {
  pthread_cond_signal(condition); /* which is all that the original does */
  char name[16] = "";
  pthread_getname_np(pthread_self(), name, sizeof name);
  if (!strncmp(name, "pt_autograd", 11)) {
    usleep(300000);
  }
}
