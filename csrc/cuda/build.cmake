# Run at build time: compiles csrc/cuda for the architectures that we serve. A toolkit that does not like its host
# compiler is no reason not to install: without REQUIRED a failure is said, and sums are left to NCCL.
set(architectures 80 90a 100)
set(codes "")
foreach(each IN LISTS architectures)
  list(APPEND codes "-gencode=arch=compute_${each},code=sm_${each}")
endforeach()
execute_process(
  COMMAND "${NVCC}" -shared -O3 -std=c++17 -Xcompiler -fPIC --threads 0 ${codes} -o "${OUT}" "${SOURCE}"
  RESULT_VARIABLE code OUTPUT_VARIABLE said ERROR_VARIABLE said)
if(NOT code EQUAL 0)
  if(REQUIRED)
    message(FATAL_ERROR "${NVCC} failed:\n${said}")
  endif()
  message(WARNING "quintet._cuda_comm is not built: ${NVCC} failed:\n${said}\nSmall sums over several GPUs are left to NCCL.")
endif()
file(TOUCH "${STAMP}")
