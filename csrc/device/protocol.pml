/* The protocol of flag-ordered collectives as a Promela model, for the checker spin.

   What is modelled, under the same names: wait_data(), wait_credit() and post_slice() of protocol.h, the loop over
   primitives of flag_ordered.h with the counters of connection.h, the chains of schedule/chain.h, and how the
   communicator replaces a connection set after a failure and frees the old one. RANKS ranks with one channel run
   OPERATIONS operations of SLICES slices: broadcasts from 0, 1, 2, then reduces to 0, 1, 2.

   tests/test_protocol_model.py checks it twice, because a timeout turns every deadlock into a legal way out:
     TIMEOUTS=0  every operation completes (a deadlock is an "invalid end state" to spin), also when ranks run ahead.
     TIMEOUTS=1  any wait may expire at any step, ranks start late, the host runs ahead: no slot is overwritten or read
                 while it is written, an operation that is not reported as failed is right, nothing freed is touched.
   and plants each FAULT below, which must then be found. The model interleaves single accesses of memory and knows no
   weak memory: whether posts and waits order the copies is for ThreadSanitizer and the SASS test.

   spin 6.5.2, gcc -O2, processor time of the search on one core:
     without timeouts, 6 operations, ranks run ahead         50,971 states   0.06 s
     with timeouts, broadcasts from 0, 1, 2               1,800,988 states   1.8 s
     with timeouts, broadcast from 2, then reduce to 0       78,930 states   0.05 s
   Each fault is found within 24,000 states. COUNTER_PER_RANK deadlocks without timeouts (found after 70 states).

   What a rank has seen of a counter, and does not poll again (`seen` in connection.h), is not modelled: counters only
   grow, so it allows nothing that a poll would not. */

#ifndef TIMEOUTS
#define TIMEOUTS 0
#endif
/* How many of the six run, and from which one on. */
#ifndef OPERATIONS
#define OPERATIONS 6
#endif
#ifndef FIRST
#define FIRST 0
#endif
#ifndef SLOTS
#define SLOTS 2  /* a power of two, as slot indices must survive the wrap of a counter */
#endif
#define RANKS 3
#define SLICES 3

/* RUN_AHEAD=0: an operation starts on a rank once the one before has left all ranks, which Backend::begin() and end()
   promise. RUN_AHEAD=1: once it has left this rank. The protocol does not need the promise until a wait expires: then
   the rank that gave up could start the next operation, with the same set and old counters, under the other ranks. */
#ifndef RUN_AHEAD
#define RUN_AHEAD 0
#endif

#define NO_FAULT 0
#define EARLY_CREDIT 1       /* the sender believes in one slot more than there is */
#define OFF_BY_ONE_SLICE 2   /* the receiver is content with the slice before */
#define POST_BEFORE_COPY 3   /* a slice is posted before it is copied */
#define COUNTER_PER_RANK 4   /* one counter a rank instead of two a connection */
#define PLAIN_COMPARE 5      /* seen >= wanted, though counters wrap */
#define IGNORE_EXPIRED 6     /* a block goes on after a wait that expired */
#define SET_REUSED 7         /* once all blocks have left, the abort word is cleared and the set used again */
#define FREED_AT_ONCE 8      /* a poisoned set is freed before all work that may use it has finished */
#ifndef FAULT
#define FAULT NO_FAULT
#endif

/* schedule/chain.h. A reduce runs 0, 1, 2 and hops to the root. There the results follow the slices that it sends on,
   since its lag is SLICES here: all of them fit into the slots of the hops. */
#define NONE 9
#define ROOT(op) (((op) + FIRST) % RANKS)
#define IS_REDUCE(op) ((op) + FIRST >= RANKS)
#define LAST (RANKS - 1)
#define HAS_HOP(op) (IS_REDUCE(op) && ROOT(op) != LAST)
#define PRIM_COUNT (HAS_HOP(op) && rank == ROOT(op) -> 2 * SLICES : SLICES)
#define VRANK ((rank + RANKS - ROOT(op)) % RANKS)

inline prim_at() {
  if
  :: !IS_REDUCE(op) ->
     recv_from = (VRANK == 0 -> NONE : (rank + RANKS - 1) % RANKS);
     send_to = (VRANK == LAST -> NONE : (rank + 1) % RANKS)
  :: IS_REDUCE(op) && i < SLICES ->
     recv_from = (rank == 0 -> NONE : rank - 1);
     send_to = (rank < LAST -> rank + 1 : (HAS_HOP(op) -> ROOT(op) : NONE))
  :: else -> recv_from = LAST; send_to = NONE
  fi
}

/* Connection sets: the words of SendEnd and RecvEnd and the slots, for each set and directed pair of ranks. Memory is
   never used again here, so that a touch of what was freed is seen. Counters start where a byte is about to wrap. */
#if TIMEOUTS
#define SETS OPERATIONS
#else
#define SETS 1
#endif
#define CONNECTIONS (SETS * RANKS * RANKS)
#define CONNECTION(from, to) ((set * RANKS + (from)) * RANKS + (to))
#define START 254
byte sent[CONNECTIONS] = START;      /* *SendEnd::sent */
byte received[CONNECTIONS] = START;  /* *RecvEnd::received */
byte tail[CONNECTIONS] = START;      /* written by the sender, polled by the receiver */
byte credits[CONNECTIONS] = START;   /* written by the receiver, polled by the sender */
bool abort_word[SETS];
bool freed[SETS];

/* What a slot holds: nothing that is still needed, a copy in progress, or a slice of an operation. */
#define EMPTY 255
#define WRITING 254
#define SLICE (op * SLICES + i % SLICES)
byte slot[CONNECTIONS * SLOTS] = EMPTY;
#define SLOT_IN slot[CONNECTION(recv_from, rank) * SLOTS + in_step % SLOTS]
#define SLOT_OUT slot[CONNECTION(rank, send_to) * SLOTS + out_step % SLOTS]

/* The counters of the two ends of a connection. */
#if FAULT == COUNTER_PER_RANK
byte steps[RANKS] = START;
#define SENT steps[rank]
#define RECEIVED steps[rank]
#else
#define SENT sent[CONNECTION(rank, send_to)]
#define RECEIVED received[CONNECTION(recv_from, rank)]
#endif

/* Launches. */
byte launched;              /* operations launched so far */
byte set_of[OPERATIONS];    /* FlagArgs: which set an operation was launched with */
byte left[OPERATIONS];      /* blocks that have left it */
byte complete[OPERATIONS];  /* blocks that returned true */
bool reported[OPERATIONS];  /* as failed */
#define FINISHED(ticket) ((ticket) == 0 || left[(ticket) - 1] == RANKS)

/* The first operation of a set that a block left early. Operations launched with the set later, before the host knew,
   fail too: what they move is not checked. */
#define NEVER 255
byte failed[SETS] = NEVER;
#define EXPECT(condition) assert(op > failed[set] || (condition))
#define TOUCH assert(!freed[set])

/* wait_reached(). The guards stand for polling: a process goes on when one of them holds. While the flag is not there,
   a wait may expire at any step, or see that another one has. */
#if FAULT == PLAIN_COMPARE
#define REACHED(seen, wanted) ((seen) >= ((wanted) & 255))
#else
#define REACHED(seen, wanted) ((((seen) - (wanted)) & 255) < 128)
#endif

inline wait_reached(word, wanted) {
  if
  :: REACHED(word, wanted) -> TOUCH
#if TIMEOUTS
  :: !REACHED(word, wanted) && abort_word[set] -> TOUCH; leave_early()
  :: !REACHED(word, wanted) && !abort_word[set] -> TOUCH; abort_word[set] = true; leave_early()
#endif
  fi
}

inline leave_early() {
  failed[set] = (op < failed[set] -> op : failed[set]);
  if
  :: FAULT != IGNORE_EXPIRED -> goto leave
  :: else
  fi
}

inline wait_data() { wait_reached(tail[CONNECTION(recv_from, rank)], in_step + 1 - (FAULT == OFF_BY_ONE_SLICE)) }

inline wait_credit() {
  wait_reached(credits[CONNECTION(rank, send_to)], out_step + 1 - SLOTS - (FAULT == EARLY_CREDIT))
}

inline post_tail() {
  if
  :: send_to != NONE -> TOUCH; tail[CONNECTION(rank, send_to)] = out_step + 1
  :: else
  fi
}
inline post_credit() {
  if
  :: recv_from != NONE -> TOUCH; credits[CONNECTION(recv_from, rank)] = in_step + 1
  :: else
  fi
}

/* What FlagBlock::post() leaves in the ends. */
inline advance() {
  if
  :: recv_from != NONE -> TOUCH; RECEIVED = in_step + 1
  :: else
  fi;
  if
  :: send_to != NONE -> TOUCH; SENT = out_step + 1
  :: else
  fi
}
inline read_steps() {
  if
  :: recv_from != NONE -> TOUCH; in_step = RECEIVED
  :: else
  fi;
  if
  :: send_to != NONE -> TOUCH; out_step = SENT
  :: else
  fi
}

/* FlagBlock::move(), begun and ended in two steps, so that anything may happen while the copy runs. */
inline begin_copy() {
  TOUCH;
  if
  :: recv_from != NONE -> EXPECT(SLOT_IN == SLICE)
  :: else
  fi;
  if
  :: send_to != NONE -> EXPECT(SLOT_OUT == EMPTY); SLOT_OUT = WRITING
  :: else
  fi
}
inline end_copy() {
  TOUCH;
  if
  :: recv_from != NONE -> EXPECT(SLOT_IN == SLICE); SLOT_IN = EMPTY
  :: else
  fi;
  if
  :: send_to != NONE -> EXPECT(SLOT_OUT == WRITING); SLOT_OUT = SLICE
  :: else
  fi
}

/* run_flag_ordered(), one operation after the other. A rank is late when the others go first. A primitive takes two
   steps: up to the begin of its copy, and from its end on. Finer ones would find nothing more: counters only grow, so
   what a wait has seen stays true; a flag posted later is a peer that looks later; and each side of a slot checks, at
   both steps, that the other one is away. */
active [RANKS] proctype block() {
  byte rank = _pid;
  byte op, set, i, recv_from, send_to, in_step, out_step;
  do
  :: op < OPERATIONS ->
     atomic {
       launched > op && (RUN_AHEAD || FINISHED(op));
       set = set_of[op]; i = 0
     }
     do
     :: atomic { i < PRIM_COUNT ->
          prim_at();
          read_steps();
          if
          :: recv_from != NONE -> wait_data()
          :: else
          fi;
          if
          :: send_to != NONE -> wait_credit()
          :: else
          fi;
#if FAULT == POST_BEFORE_COPY
          post_tail();
#endif
          begin_copy()
        }
        atomic {
          end_copy();
#if FAULT != POST_BEFORE_COPY
          post_tail();
#endif
          post_credit();
          advance();
          i++
        }
     :: atomic { i == PRIM_COUNT -> complete[op]++; break }
     od;
leave:
     atomic { left[op]++; op++; set = 0; i = 0; recv_from = 0; send_to = 0; in_step = 0; out_step = 0 }
  :: else -> break
  od
}

/* The communicator. A call returns at once, so the host launches ahead of the ranks, as far as it likes. */
byte ticket[SETS];  /* of a retired set: operations launched until then; 0: not retired */

inline free_retired() {
  k = 0;
  do
  :: k < SETS ->
     if
     :: ticket[k] != 0 && FINISHED(ticket[k]) -> freed[k] = true
     :: else
     fi;
     k++
  :: else -> break
  od;
  k = 0
}

/* The call that raises launches nothing; here the user then repeats it. */
inline raise_failure() {
  if
  :: abort_word[set] ->
     k = failed[set];
     do
     :: k < launched -> reported[k] = true; k++
     :: else -> break
     od;
#if FAULT == SET_REUSED
     abort_word[set] = false; failed[set] = NEVER
#else
     ticket[set] = launched;
     freed[set] = (FAULT == FREED_AT_ONCE);
     set++  /* a new set, with a new abort word */
#endif
  :: else
  fi;
  free_retired()
}

active proctype host() {
  byte op, set, k;
  do
  :: op < OPERATIONS ->
#if FAULT == SET_REUSED
     FINISHED(launched);
#endif
     d_step { raise_failure() }
     d_step { set_of[op] = set; op++; launched = op }  /* run_flagged() */
  :: else -> break
  od;
  FINISHED(OPERATIONS);  /* synchronize() */
  d_step {
    raise_failure();
    op = 0;
    do
    :: op < OPERATIONS -> assert(complete[op] == RANKS || reported[op]); op++
    :: else -> break
    od
  }
}
